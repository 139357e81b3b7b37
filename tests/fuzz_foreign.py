"""What `tests/fuzz.py` does to folders and servers of others, and the canaries that show what got out or was changed.

A canary is a file outside the folder that a program is given. Damage plants links to it, names its path, and swaps it
for what a program writes. Whatever the program then does, the canaries must be as they were, and their content must be
in nothing that the program says or writes.
"""

import atexit
import base64
import contextlib
import hashlib
import http.client
import io
import json
import os
import shutil
import sys

import httpx2
import torch
from PIL import Image

import generate
import post_train
from sage_grpo.data.requests import read_requests
from sage_grpo.environment import TOKEN_VARIABLE
from sage_grpo.rewards import client
from sage_grpo.rewards.base import Composite, Setup
from sage_grpo.rewards.judge import Judge
from sage_grpo.rewards.remote import RemoteReward
from sage_grpo.runs import lock
from sage_grpo.runs.card import model_card
from sage_grpo.runs.case import Case
from sage_grpo.runs.clips import read_validations
from sage_grpo.runs.hacking import divergence
from sage_grpo.runs.history import read_run
from sage_grpo.tools import diagnose
from sage_grpo.tools.paired import validation_clips
from scripts import export_checkpoint, verify_weights
from tests.hostile import sealed_again
from tests.programs import exit_code
from tests.rewards.serving import TOKEN
from tests.smallest_run import command_line, prepare_process, smallest_run, write_trivial_model

SECRET = b"canary:0123456789abcdef:canary "  # 31 bytes
SEEN = (SECRET[:30], base64.b64encode(SECRET[:30]))  # as it is, and inside a page
MAX_SEARCHED = 1 << 24  # bytes of a file that is searched for the secret
CLIPS = [torch.full((2, 4, 4, 3), 60, dtype=torch.uint8)] * 2
PROMPTS = ["a red circle", "a green square"]


class Leak(Exception):
    """A canary's content, where it does not belong."""


class Written(Exception):
    """A canary that was changed, added or deleted."""


# canaries


class Canaries:
    """A tree of files of the user: secrets, pictures, and a run whose names are those that programs write."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "checkpoints" / "step-000001").mkdir(parents=True)
        (folder / "checkpoints" / "step-000001" / "manifest.json").write_text('{"files": {}}')
        for name in ("key", "config.yaml", "status.json", "metrics.jsonl", "clip.mp4"):
            (folder / name).write_bytes(SECRET)
        (folder / "valid.json").write_text(json.dumps({"state": SECRET.decode(), "message": "x"}))
        Image.new("RGB", (16, 16), "red").save(folder / "picture.png")
        self.before = self.state()

    def state(self):
        """Hash of every file, by name."""
        return {
            str(path.relative_to(self.folder)): _digest(path)
            for path in sorted(self.folder.rglob("*"))
        }

    def check(self, said, case):
        """Raise if a canary was touched, or if something that was said or written in `case` holds the secret."""
        if self.state() != self.before:
            raise Written(f"a canary was changed in {self.folder}")
        if SECRET[:30].decode() in said:
            raise Leak("the secret was printed")
        for path in case.rglob("*"):
            if path.is_symlink() or not path.is_file() or path.stat().st_size > MAX_SEARCHED:
                continue
            content = path.read_bytes()
            if any(text in content for text in SEEN):
                raise Leak(f"the secret is in {path.relative_to(case)}")

    def path(self, rng):
        """One of the canaries, or the whole tree."""
        return rng.choice([self.folder, *sorted(self.folder.rglob("*"))])


def _digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"


# good folders


# what would make cases wait: pauses in seconds between looks at a planted lock, and before a server is asked again
QUICK = ((lock, "LOOK", 0.001), (client, "PAUSES", ()))


def settle_foreign():
    """Prepare a process that does nothing but run cases."""
    prepare_process()
    os.environ[TOKEN_VARIABLE] = TOKEN
    for owner, name, value in QUICK:
        setattr(owner, name, value)


def make_foreign_folders(good):
    """The folders of this file's kinds, made with the trivial model, which the process must know."""
    model = write_trivial_model(good / "trivial")
    (good / "resumed").mkdir()
    flags = smallest_run(model, good / "resumed", **RESUMED)
    flags["output_dir"] = str(good / "resumed" / "run")
    if post_train.main(command_line(flags)) != 0:
        raise RuntimeError("the run to resume could not be made")
    write_prompts(good / "prompts")
    for name in ("judge", "remote", "hub"):
        (good / name).mkdir()
        (good / name / "replies.json").write_text(json.dumps(REPLIES[name]))


RESUMED = {"max_steps": 2, "save_interval": 1, "validation_interval": 0, "use_lora": True}


def write_prompts(folder):
    """Prompt files with images, and the images."""
    folder.mkdir()
    for name, color in (("a.png", "red"), ("b.jpg", "green"), ("c.webp", "blue")):
        Image.new("RGB", (24, 16), color).save(folder / name)
    names = ("a.png", "b.jpg", "c.webp")
    rows = [{"prompt": f"a shape {i}", "image": name, "seed": i} for i, name in enumerate(names)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = ["prompt,index,seed,image", *(f"a shape,{i},7,{name}" for i, name in enumerate(names))]
    (folder / "prompts.csv").write_text("\n".join(lines) + "\n")


_GRADES = {"VQ": 4, "MQ": 3, "TA": 5}
_LIKELY = [{"token": str(digit), "logprob": -float(digit)} for digit in range(1, 6)]
_TOKENS = [{"token": "4", "logprob": -0.1, "top_logprobs": _LIKELY} for _ in _GRADES]
# what a good server says, by path; damage changes a place in it
REPLIES = {
    "judge": {
        "/v1/models": {"object": "list", "data": [{"id": "vlm", "object": "model"}]},
        "/v1/chat/completions": {
            "choices": [
                {
                    "message": {"role": "assistant", "content": json.dumps(_GRADES)},
                    "logprobs": {"content": _TOKENS},
                }
            ],
            "usage": {"prompt_tokens": 9, "completion_tokens": 3},
        },
    },
    "remote": {
        "/info": {"names": ["light"], "rewards": ["x"], "max_clips": 8, "max_bytes": 1 << 20},
        "/check": {},
        "/score": {"scores": {"light": [0.5, 0.25]}, "errors": []},
    },
    "hub": {
        "siblings": [
            {"rfilename": "a.json", "size": 2},
            {"rfilename": "b.bin", "size": 3, "lfs": {"sha256": "0" * 64}},
        ]
    },
}
# what reading an answer raises that is not JSON, or not even HTTP
BROKEN_OFF = (
    http.client.IncompleteRead(b'{"siblings": ['),
    http.client.BadStatusLine("garbage"),
    http.client.LineTooLong("header line"),
    ConnectionResetError(104, "Connection reset by peer"),
)
STATUSES = (200, 200, 200, 200, 200, 200, 200, 204, 301, 401, 404, 429, 500, 503)


# damage that is particular to them


def plant(folder, rng, canaries, names):
    """Put a link, a pipe or a folder where a program reads or writes; returns what was done."""
    name = rng.choice(names)
    place = folder / name
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)
    deed = rng.choice(["canary"] * 6 + ["nowhere", "itself", "pipe", "folder"])
    if deed == "canary":
        place.symlink_to(canaries.path(rng))
    elif deed == "nowhere":
        place.symlink_to(canaries.folder / "new")
    elif deed == "itself":
        place.symlink_to(place)
    elif deed == "pipe":
        os.mkfifo(place)
    else:
        place.mkdir()
    return f"{deed} planted at {name}"


# names that a run writes, and what reads it opens
IN_RUN = (
    "config.yaml",
    "command.txt",
    "status.json",
    "metrics.jsonl",
    "report.html",
    "validation",
    "validation/step-000002",
    "checkpoints",
    "checkpoints/step-000001",
    "checkpoints/step-000002",
    "checkpoints/step-000003",
    "checkpoints/step-000002.tmp",
    "checkpoints/step-000003.tmp",
    "checkpoints/step-000002/trainer",
    "checkpoints/step-000002/trainer/state.json",
    "checkpoints/step-000002/README.md",
    "checkpoints/step-000002/pytorch_lora_weights.safetensors",
    "flight",
    "tensorboard",
    "wandb_id",
    "lock",
)
IN_CHECKPOINT = (
    "transformer",
    "pytorch_lora_weights.safetensors",
    "trainer",
    "trainer/state.json",
    "trainer/rank-00000.safetensors",
    "README.md",
)


def misname_image(folder, rng, canaries):
    """Let a prompt file name an image elsewhere, or put something else in an image's place."""
    (folder / "link.png").symlink_to(canaries.folder / "picture.png")
    os.mkfifo(folder / "pipe.png")
    (folder / "folder.png").mkdir()
    name = rng.choice(
        [
            str(canaries.folder / "picture.png"),
            "../../../canaries/picture.png",
            "../" * 30 + "dev/zero",
            "/dev/zero",
            "/dev/stdin",
            "/proc/self/mem",
            "link.png",
            "pipe.png",
            "folder.png",
            ".",
            "",
            "a.png/../a.png",
            "x" * 5000,
            "\0",
            "\ud800",
            "prompts.csv",
            7,
            None,
            ["a.png"],
        ]
    )
    row = {"prompt": "a shape", "image": name}
    (folder / "prompts.jsonl").write_text(json.dumps(row) + "\n")
    return f"the image {name!r:.80}"


# readers


def run_program(main, words, codes=(0, 2), refusals=(2,)):
    """Run a program; the exit codes of `refusals` are raised, and a traceback that it prints is an error."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = exit_code(main, [str(word) for word in words])
    text = said.getvalue()
    print(text, file=sys.stderr)
    if "Traceback" in text:
        raise AssertionError(text)
    if code not in codes:
        raise AssertionError(f"exit code {code}: {text}")
    if code in refusals:
        raise ValueError(text.strip().splitlines()[-1] if text.strip() else "")


def read_diagnosis(folder):
    run_program(diagnose.main, [folder], codes=(0, 1, 2, diagnose.TOO_EARLY))


def read_elsewhere(folder):
    """Everything that reads a run folder besides report and diagnosis: a resumed run, a card, generate.py."""
    refusals = []
    for read in (
        lambda: Case(read_run(folder)).direction,
        lambda: divergence(folder, 2),
        lambda: read_validations(folder),
        lambda: validation_clips(read_run(folder)),
        lambda: generate.find_weights(str(folder)),
        lambda: model_card(CARD, read_run(folder), step=2, reward="VQ", base="0"),
    ):
        try:
            read()
        except (ValueError, OSError) as error:
            refusals.append(error)
    if refusals:
        raise ValueError(str(refusals[0]))


CARD = {"pretrained_model_root": "assets/tiny", "use_lora": True}


def resume(folder):
    """Go on with a run folder of somebody else, for one iteration, and delete old checkpoints."""
    prompts = folder / "prompts.txt"
    run = folder / "run"
    words = ["--config", run / "config.yaml"] if (run / "config.yaml").is_file() else []
    flags = smallest_run(folder.parents[2] / "good" / "trivial", folder, **RESUMED)
    flags |= {
        "output_dir": str(run),
        "train_prompts": str(prompts),
        "validation_prompts": str(prompts),
        "max_steps": 3,
        "keep_checkpoints": 1,
        "start_timeout": 1,
        "resume_from_checkpoint": "auto",
        "device": "cpu",
    }
    run_program(post_train.main, [*words, *command_line(flags)], codes=(0, 1, 2))


def export(folder, rng):
    """Export a checkpoint of somebody else, with hashes to match."""
    with contextlib.suppress(OSError, ValueError):
        sealed_again(folder)
    layout = rng.choice(["diffusers", "diffusers", "tencent", "comfyui", "lora"])
    words = ["--checkpoint", folder, "--output", folder.parents[1] / "exported", "--layout", layout]
    run_program(export_checkpoint.main, words)


def read_prompts(folder):
    refusals = []
    for name in ("prompts.csv", "prompts.jsonl"):
        try:
            for request in read_requests(folder / name):
                picture = request.sized(8, 8).image
                if picture is None:
                    continue
                if not picture.path.resolve().is_relative_to(folder.resolve()):
                    raise Leak(f"{name} showed {picture.path}")
                picture.cropped()
        except (ValueError, OSError) as error:
            refusals.append(error)
    if refusals:
        raise ValueError(str(refusals[0]))


def answers(folder, rng):
    """A transport that answers with the replies in a folder, sometimes with other bytes or another status."""
    text = (folder / "replies.json").read_bytes()
    with contextlib.suppress(ValueError, RecursionError):
        replies = json.loads(text)
        status = rng.choice(STATUSES)
        spoilt = rng.choice(["/v1/models", "/info", "/check", "", "", "", ""])

        def answer(request):
            reply = replies.get(request.url.path) if isinstance(replies, dict) else replies
            body = json.dumps(reply).encode()
            is_spoilt = request.url.path == spoilt
            return httpx2.Response(status if is_spoilt else 200, stream=httpx2.ByteStream(body))

        return answer
    return lambda request: httpx2.Response(200, stream=httpx2.ByteStream(text))


@contextlib.contextmanager
def served(folder, rng):
    """Context in which clients of servers reach the replies in a folder."""
    opened = client._open_client
    transport = httpx2.MockTransport(answers(folder, rng))
    client._open_client = lambda url, timeout, token: httpx2.Client(
        base_url=url, transport=transport
    )
    try:
        yield
    finally:
        client._open_client = opened


def ask_server(folder, rng, kind):
    """Build the reward of a server, check prompts and score clips twice: a reward that fails gives NaN."""
    setup = Setup(
        folder,
        torch.device("cpu"),
        url="http://127.0.0.1:1",
        timeout=5.0,
        start_timeout=5.0,
        judge_cache=str(folder / "cache") if kind == "judge" else None,
    )
    with served(folder, rng):
        reward = {"judge": Judge, "remote": RemoteReward}[kind](setup)
        if kind == "judge":
            atexit.unregister(reward._print_counts)
        composite = Composite({kind: reward}, None, timeout=5.0)
        composite.check(PROMPTS)
        for _ in range(2):
            scores = composite.score(CLIPS, PROMPTS, 8.0)
            failed = ~scores.total.isfinite()
            if bool(failed.any()) != bool(scores.errors):
                raise AssertionError(f"{int(failed.sum())} failures with {scores.errors}")
            for error in scores.errors:
                if len(error.splitlines()) != 1:
                    raise AssertionError(f"not one sentence: {error!r}")
    if scores.errors:
        raise ValueError(scores.errors[0])


def verify(folder, rng, canaries):
    """Compare a folder with what a hub lists, and delete what is wrong in it."""
    replies = (folder / "replies.json").read_bytes()
    broken = rng.choice((None, None, None, None, *BROKEN_OFF))
    weights = folder / "weights"
    weights.mkdir()
    for name in ("a.json", "b.bin"):
        (weights / name).write_text("{}")
    if rng.random() < 0.5:
        text = replies.replace(b"a.json", str(canaries.path(rng)).encode())
        up = b"../../../../canaries/key"
        replies = text if rng.random() < 0.5 else replies.replace(b"a.json", up)

    def ask(url):
        if broken:
            raise broken
        return json.loads(replies)

    asked = verify_weights.ask
    verify_weights.ask = ask
    try:
        words = ["x/y", weights, "--remove_wrong"]
        run_program(verify_weights.main, words, codes=(0, 1, 2), refusals=(1, 2))
    finally:
        verify_weights.ask = asked
