"""A vision-language model as a reward, behind any server that speaks OpenAI's protocol (vLLM, SGLang).

It sees frames of a clip and a rubric that names the scores, and answers in JSON with a digit from 1 to 5 for each. The
score is that digit, or its expected value over the model's probabilities, as the rubric's first line says.
"""

import atexit
import base64
import hashlib
import io
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from sage_grpo.background import Work
from sage_grpo.files.json_files import printable, read_object, write_json
from sage_grpo.rewards.base import Reward, Setup
from sage_grpo.rewards.remote import RemoteError, Server, read_json
from sage_grpo.rewards.video_frames import check_clips, sample_indices

RUBRIC, PLACEHOLDER = Path(__file__).with_name("rubric.txt"), "{prompt}"
REPORT = "judge: {asked} clips asked for, {known} known; {prompt_tokens} prompt and {completion_tokens} answer tokens"


def read_rubric(path: Path) -> tuple[str, tuple[str, ...], bool]:
    """What the judge is asked, the scores that its headings `## NAME` name, and whether probabilities count.

    The first line, `answer: json` or `answer: logprobs`, is not sent.
    """
    head, _, text = path.read_text(encoding="utf-8").partition("\n")
    names = re.findall(
        r"^## ([A-Za-z_]+)$", text, re.MULTILINE
    )  # a digit in a name could pass for a score
    named = text.count(PLACEHOLDER) == 1 and len(names) == len(set(names)) > 0
    if not named or head not in ("answer: json", "answer: logprobs"):
        raise ValueError(
            f"judge_rubric {path} must begin with the line `answer: json` or `answer: logprobs`, hold {PLACEHOLDER} "
            "once, and have a heading `## NAME`, in letters, for each score"
        )
    return text, tuple(names), head.endswith("logprobs")


class Judge(Server, Reward):
    """Scores each clip by one request; the clips of a batch are asked for at the same time."""

    retried, hint, content_type = (429, 500, 502, 503, 504), "vLLM or SGLang", "application/json"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        model, rubric, cache = setup.judge
        self.rubric, self.names, self.by_probability = read_rubric(Path(rubric or RUBRIC))
        self.cache, self.sample_fps, self.failures = cache and Path(cache), setup.sample_fps, []
        self.known, self.counts = (
            {},
            Counter(),
        )  # scores by the hash of the question; questions and tokens
        served = [
            str(each.get("id")) for each in self._ask_in_time("GET", "/v1/models").get("data") or ()
        ]
        if (model is None and len(served) != 1) or (model is not None and model not in served):
            raise RemoteError(
                f"judge_model is {model}; {self.url} serves {printable(', '.join(served)) or 'none'}"
            )
        self.model = model or served[0]
        atexit.register(lambda: print(REPORT.format_map(self.counts), file=sys.stderr))

    def score(
        self, clips: Sequence[Tensor], prompts: Sequence[str], fps: float
    ) -> dict[str, Tensor]:
        """Scores (B,) fp64, 1 to 5; NaN for a clip that could not be judged, with a sentence in `failures`."""
        check_clips(clips, prompts, fps)
        requests = [
            self._request(clip, prompt, fps) for clip, prompt in zip(clips, prompts, strict=True)
        ]
        rows, self.failures = [], []
        for call in [Work(lambda _, body=body: self._judged(body)) for body in requests]:
            try:
                scores, used = call.result()
                self.counts.update(used)
            except (ValueError, OSError) as error:
                scores = dict.fromkeys(self.names, math.nan)
                self.failures.append(printable(error))
            rows.append(scores)
        return {
            name: torch.tensor([row[name] for row in rows], dtype=torch.float64)
            for name in self.names
        }

    def _judged(self, request: bytes) -> tuple[dict[str, float], dict[str, int]]:
        """Scores, and what they cost: nothing if the same question was answered before."""
        key = hashlib.sha256(request).hexdigest()
        file = self.cache and self.cache / f"{key}.json"
        if key not in self.known and file and file.is_file():
            self.known[key] = checked(read_object(file), self.names, str(file))
        if key in self.known:
            return self.known[key], {"known": 1}
        self.known[key], used = self._read_scores(
            self._ask("POST", "/v1/chat/completions", [request])
        )
        if file:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json(file, self.known[key])
        return self.known[key], used | {"asked": 1}

    def _request(self, clip: Tensor, prompt: str, fps: float) -> bytes:
        """A body with one image per sampled frame, then the rubric."""
        parts: list[dict[str, Any]] = []
        for frame in clip[sample_indices(len(clip), fps, self.sample_fps)].cpu().numpy():
            Image.fromarray(frame).save(file := io.BytesIO(), "PNG")
            url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
            parts.append({"type": "image_url", "image_url": {"url": url}})
        parts.append({"type": "text", "text": self.rubric.replace(PLACEHOLDER, prompt)})
        schema = {"type": "object", "additionalProperties": False, "required": list(self.names)}
        schema["properties"] = {
            name: {"type": "integer", "enum": [1, 2, 3, 4, 5]} for name in self.names
        }
        wanted = {
            "type": "json_schema",
            "json_schema": {"name": "scores", "strict": True, "schema": schema},
        }
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": parts}],
            "response_format": wanted,
        }
        body |= (
            {"logprobs": True, "top_logprobs": 20} if self.by_probability else {}
        )  # servers give no more
        return json.dumps(
            body | {"temperature": 0, "max_tokens": 32 * (1 + len(self.names))}
        ).encode()

    def _read_scores(self, answer: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, int]]:
        """Scores and counts of an answer; RemoteError if anything is missing or out of range."""
        try:
            choice, usage = answer["choices"][0], answer.get("usage") or {}
            used = {
                kind: int(usage.get(kind) or 0) for kind in ("prompt_tokens", "completion_tokens")
            }
            scores = checked(read_json(choice["message"]["content"].encode()), self.names, self.url)
            if not self.by_probability:
                return scores, used
            tokens = [
                token
                for token in choice["logprobs"]["content"]
                if token["token"].strip().isdecimal()
            ]
            if len(tokens) != len(scores):
                raise RemoteError(
                    f"{self.url} gave the probabilities of {len(tokens)} digits for {len(scores)} scores"
                )
            return dict(
                zip(
                    scores, (expected_digit(token["top_logprobs"]) for token in tokens), strict=True
                )
            ), used
        except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
            text = f"{type(error).__name__}: {error}"
            raise RemoteError(
                f"{self.url} answered without what the rubric asks for ({text})"
            ) from error


def checked(scores: Any, names: Sequence[str], where: str) -> dict[str, float]:
    """Scores in their own order, if there is a number from 1 to 5 for each name."""
    numbers = scores.values() if isinstance(scores, dict) and set(scores) == set(names) else [None]
    if not all(type(value) in (int, float) and 1 <= value <= 5 for value in numbers):
        raise RemoteError(
            f"{where} gave {printable(scores)}; expected 1 to 5 for {', '.join(names)}"
        )
    return scores


def expected_digit(alternatives: Sequence[Mapping[str, Any]]) -> float:
    """Mean of the digits 1 to 5 over their probabilities among the likely tokens; blanks around one do not matter."""
    likely = [(one["token"].strip(), math.exp(one["logprob"])) for one in alternatives]
    weights = {
        digit: sum(weight for token, weight in likely if token == str(digit))
        for digit in range(1, 6)
    }
    if not 0 < (total := sum(weights.values())) < math.inf:
        raise RemoteError("no digit from 1 to 5 is among the likely tokens")
    return sum(digit * weight for digit, weight in weights.items()) / total
