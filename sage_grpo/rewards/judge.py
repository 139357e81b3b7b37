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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from sage_grpo.background import Work
from sage_grpo.files.fingerprints import text_fingerprint
from sage_grpo.files.foreign import read_bytes
from sage_grpo.files.json_files import printable, write_json
from sage_grpo.files.paths import check_folder
from sage_grpo.rewards.base import Reward, Setup
from sage_grpo.rewards.client import RemoteError, ServerClient, read_json
from sage_grpo.rewards.video_frames import check_clips, sample_indices

RUBRIC = Path(__file__).with_name("rubric.txt")
PLACEHOLDER = "{prompt}"
MAX_TOKENS = 2**31  # of one answer
MAX_BYTES = 1 << 16  # of a file in the cache


@dataclass(frozen=True)
class Rubric:
    """The instructions to the judge."""

    text: str  # with PLACEHOLDER where the prompt belongs
    names: tuple[str, ...]  # of the scores
    by_probability: bool  # whether a score is the expected digit instead of the likeliest


def read_rubric(path: Path) -> Rubric:
    """Read a rubric, whose headings `## NAME` name the scores.

    Its first line, `answer: json` or `answer: logprobs`, is not sent.
    """
    try:
        rubric = path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ValueError(f"judge_rubric {path} cannot be read: {error}") from error
    first_line, _, text = rubric.partition("\n")
    # letters only: a digit in a name could be taken for a score
    names = re.findall(r"^## ([A-Za-z_]+)$", text, re.MULTILINE)
    has_names = len(names) > 0 and len(names) == len(set(names))
    has_answer = first_line in ("answer: json", "answer: logprobs")
    if not has_names or not has_answer or text.count(PLACEHOLDER) != 1:
        raise ValueError(
            f"judge_rubric {path} must begin with the line `answer: json` or `answer: logprobs`, "
            f"hold {PLACEHOLDER} once, and have a heading `## NAME`, in letters, for each score"
        )
    return Rubric(text, tuple(names), first_line == "answer: logprobs")


class Judge(ServerClient, Reward):
    """Scores each clip with one request; the clips of a batch are sent at the same time."""

    busy_statuses = (429, 500, 502, 503, 504)
    hint = "vLLM or SGLang"
    content_type = "application/json"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.rubric = read_rubric(Path(setup.judge_rubric or RUBRIC))
        self.names = self.rubric.names
        self.cache = _usable_cache(setup.judge_cache)
        self.cache_notes: set[str] = set()  # printed so far: "read", "written"
        self.sample_fps = setup.sample_fps_or_default
        self.known: dict[str, dict[str, float]] = {}  # scores by the hash of the request
        self.counts: Counter[str] = Counter()  # of requests and tokens
        self.failures: list[str] = []  # of the last batch, one sentence per clip
        self.model = self._choose_model(setup.judge_model)
        atexit.register(self._print_counts)

    def _choose_model(self, wanted: str | None) -> str:
        """The wanted model if the server has it; by default, the only one that it has."""
        models = self._ask_in_time("GET", "/v1/models").get("data") or []
        if not isinstance(models, list) or not all(isinstance(model, dict) for model in models):
            raise RemoteError(
                f"{self.url} lists its models as {printable(models)}; is {self.hint} running there?"
            )
        served = [str(model.get("id")) for model in models]
        if wanted in served:
            return wanted
        if wanted is None and len(served) == 1:
            return served[0]
        raise RemoteError(
            f"judge_model is {wanted}; {self.url} serves {printable(', '.join(served)) or 'none'}"
        )

    def fingerprint(self) -> dict[str, str]:
        return {"model": printable(self.model), "rubric": text_fingerprint(repr(self.rubric))}

    def _print_counts(self) -> None:
        counts = self.counts
        print(
            f"judge: {counts['asked']} clips asked for, {counts['known']} known; "
            f"{counts['prompt_tokens']} prompt and {counts['completion_tokens']} answer tokens",
            file=sys.stderr,
        )

    def score(
        self, clips: Sequence[Tensor], prompts: Sequence[str], fps: float
    ) -> dict[str, Tensor]:
        """Scores (B,) fp64, 1 to 5; NaN for a clip that could not be judged, with a sentence in `failures`."""
        check_clips(clips, prompts, fps)
        requests = [
            self._request(clip, prompt, fps) for clip, prompt in zip(clips, prompts, strict=True)
        ]
        calls = [Work(lambda _, request=request: self._judged(request)) for request in requests]
        rows = []
        self.failures = []
        for call in calls:
            try:
                scores, counts = call.result()
                self.counts.update(counts)
            except (ValueError, OSError) as error:
                scores = dict.fromkeys(self.names, math.nan)
                self.failures.append(printable(error))
            rows.append(scores)
        return {
            name: torch.tensor([row[name] for row in rows], dtype=torch.float64)
            for name in self.names
        }

    def _judged(self, request: bytes) -> tuple[dict[str, float], dict[str, int]]:
        """Scores and what they cost: no tokens if the same request was answered before."""
        key = hashlib.sha256(request).hexdigest()
        scores = self.known.get(key) or self._cached(key)
        if scores:
            self.known[key] = scores
            return scores, {"known": 1}

        answer = self._ask("POST", "/v1/chat/completions", [request])
        scores, tokens = self._read_scores(answer)
        self.known[key] = scores
        self._store(key, scores)
        return scores, tokens | {"asked": 1}

    # the cache only saves requests: what is missing or damaged in it is asked again

    def _cached(self, key: str) -> dict[str, float] | None:
        """Scores from the cache folder; None if they are not there or cannot be read."""
        if self.cache is None:
            return None
        file = self.cache / f"{key}.json"
        try:
            return checked(read_json(read_bytes(file, MAX_BYTES)), self.names, str(file))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self._note_once("read", error)
            return None

    def _store(self, key: str, scores: Mapping[str, float]) -> None:
        if self.cache is None:
            return
        try:
            self.cache.mkdir(parents=True, exist_ok=True)
            write_json(self.cache / f"{key}.json", scores)
        except OSError as error:
            self._note_once("written", error)

    def _note_once(self, what: str, error: Exception) -> None:
        if what in self.cache_notes:
            return
        self.cache_notes.add(what)
        text = f"judge_cache {self.cache} cannot be {what} everywhere: {error}"
        print(f"note: {printable(text)}", file=sys.stderr, flush=True)

    def _request(self, clip: Tensor, prompt: str, fps: float) -> bytes:
        """A body with one image per sampled frame, then the rubric."""
        indices = sample_indices(len(clip), fps, self.sample_fps)
        images = [
            {"type": "image_url", "image_url": {"url": data_url(frame)}}
            for frame in clip[indices].cpu().numpy()
        ]
        question = {"type": "text", "text": self.rubric.text.replace(PLACEHOLDER, prompt)}
        schema = {
            "type": "object",
            "additionalProperties": False,
            "required": list(self.names),
            "properties": {
                name: {"type": "integer", "enum": [1, 2, 3, 4, 5]} for name in self.names
            },
        }
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": [*images, question]}],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "scores", "strict": True, "schema": schema},
            },
        }
        if self.rubric.by_probability:
            body["logprobs"] = True
            body["top_logprobs"] = 20  # the most that servers return
        body["temperature"] = 0
        body["max_tokens"] = 32 * (1 + len(self.names))
        return json.dumps(body).encode()

    def _read_scores(self, answer: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, int]]:
        """Scores and token counts of an answer; RemoteError if anything is missing or out of range."""
        try:
            choice = answer["choices"][0]
            digits = read_json(choice["message"]["content"].encode())
            scores = checked(digits, self.names, self.url)
            if self.rubric.by_probability:
                scores = self._expected_scores(scores, choice["logprobs"]["content"])
            return scores, token_counts(answer.get("usage"))
        except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
            raise RemoteError(
                f"{self.url} answered without what the rubric asks for "
                f"({type(error).__name__}: {error})"
            ) from error

    def _expected_scores(
        self, scores: Mapping[str, float], tokens: Sequence[Mapping[str, Any]]
    ) -> dict[str, float]:
        """Expected digits in place of the likeliest ones, given the tokens of the answer."""
        digits = [token for token in tokens if token["token"].strip().isdecimal()]
        if len(digits) != len(scores):
            raise RemoteError(
                f"{self.url} gave the probabilities of {len(digits)} digits for {len(scores)} scores"
            )
        return {
            name: expected_digit(token["top_logprobs"])
            for name, token in zip(scores, digits, strict=True)
        }


def _usable_cache(path: str | None) -> Path | None:
    """The folder of the cache, which may not exist yet; an error if a file is in its way."""
    if path is None:
        return None
    check_folder(Path(path), "judge_cache")
    return Path(path)


def token_counts(usage: Any) -> dict[str, int]:
    """Token counts of an answer; 0 where they are missing or invalid, which does not invalidate its scores."""
    counts = {}
    for kind in ("prompt_tokens", "completion_tokens"):
        count = usage.get(kind) if isinstance(usage, dict) else None
        counts[kind] = count if type(count) is int and 0 <= count < MAX_TOKENS else 0
    return counts


def data_url(frame: np.ndarray) -> str:
    """A uint8 frame (H, W, 3) as a PNG in a URL."""
    file = io.BytesIO()
    Image.fromarray(frame).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def checked(scores: Any, names: Sequence[str], where: str) -> dict[str, float]:
    """Scores in the order of the answer, if there is a number from 1 to 5 for each name."""
    has_names = isinstance(scores, dict) and set(scores) == set(names)
    if not has_names or not all(map(_is_grade, scores.values())):
        raise RemoteError(
            f"{where} gave {printable(scores)}; expected 1 to 5 for {', '.join(names)}"
        )
    return scores


def _is_grade(value: Any) -> bool:
    return type(value) in (int, float) and 1 <= value <= 5


def expected_digit(alternatives: Sequence[Mapping[str, Any]]) -> float:
    """Mean of the digits 1 to 5 over their probabilities among the likely tokens; blanks around one do not matter."""
    probabilities = dict.fromkeys(range(1, 6), 0.0)
    for alternative in alternatives:
        token = alternative["token"].strip()
        probability = math.exp(alternative["logprob"])
        if token in ("1", "2", "3", "4", "5"):
            probabilities[int(token)] += probability
    total = sum(probabilities.values())
    if not 0 < total < math.inf:
        raise RemoteError("no digit from 1 to 5 is among the likely tokens")
    return sum(digit * probability for digit, probability in probabilities.items()) / total
