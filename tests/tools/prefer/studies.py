"""Small studies for the tests: rendered clips of two systems, and a server in a thread of this process."""

import threading
import time
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx2 as httpx
import torch

from sage_grpo.runs.media import write_mp4
from sage_grpo.tools.gate import build_server, listen
from sage_grpo.tools.prefer.answers import AnswersFile
from sage_grpo.tools.prefer.blinding import strip
from sage_grpo.tools.prefer.pairs import candidates, trials
from sage_grpo.tools.prefer.server import Labeling, addresses
from sage_grpo.tools.prefer.study import Study, StudyClip, clips_folder
from sage_grpo.worlds.shapes.world import ShapesWorld

PROMPTS = ("a red circle moving left", "a green square moving right", "a blue triangle moving up")
SYSTEMS = ("base", "run-step-000080")
SIDE = 48  # pixels
PREFERS = {True: "left", False: "right"}


def draw_clip(system: int, number: int):
    """A clip (F, H, W, 3) of the shapes world; the second system's are noisy, so their files are larger."""
    clip = ShapesWorld().draw([PROMPTS[number % len(PROMPTS)]], 9, SIDE, SIDE, seed=number)[0]
    generator = torch.Generator().manual_seed(number)
    noise = 15 * system * torch.randn(clip.shape, generator=generator)
    return (clip + noise).clamp(0, 255).to(torch.uint8)


@cache
def encoded(system: int, number: int) -> bytes:
    """The mp4 file of a clip, made once for all tests of a process."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "clip.mp4"
        write_mp4(file, draw_clip(system, number), 8)
        return file.read_bytes()


@cache
def blinded(system: int, number: int) -> tuple[int, bytes]:
    """A clip as a study has it, made once for all tests: size of the file it comes from, and its bytes."""
    with TemporaryDirectory() as folder:
        source, target = Path(folder) / "source.mp4", Path(folder) / "target.mp4"
        source.write_bytes(encoded(system, number))
        strip(source, target)
        return source.stat().st_size, target.read_bytes()


def new_study(path: Path, questions=("overall",), prompts=PROMPTS, repeat=0.0) -> AnswersFile:
    """A study of two systems at `path`, with its clips."""
    clips = []
    clips_folder(path).mkdir()
    for system in range(len(SYSTEMS)):
        for number, prompt in enumerate(prompts):
            name = f"{(7 * len(clips)) % (2 * len(prompts)):02d}-{len(clips)}.mp4"
            (clips_folder(path) / name).write_bytes(blinded(system, number)[1])
            scores = {"VQ": float(system), "TA": float(number)}
            clips.append(StudyClip(name, system, prompt, seed=number, scores=scores))
    pairs = tuple(candidates(clips))
    return AnswersFile(path, Study(SYSTEMS, tuple(questions), tuple(clips), pairs, repeat))


def answer_all(file: AnswersFile, rater: str, choose) -> None:
    """choose: (pair, system on the left) -> choice."""
    study = file.study
    for number, trial in enumerate(trials(study, rater)):
        left, _ = study.pairs[trial.pair][:: -1 if trial.swapped else 1]
        choices = dict.fromkeys(study.questions, choose(trial.pair, study.clips[left].system))
        file.add(rater, number, trial, choices, 2.0)


@contextmanager
def serving(answers: AnswersFile, raters=("ann",), hosts=()):
    """Serve the page in a thread; gives the address of each rater's page."""
    labeling = Labeling(answers, raters)
    server = build_server(labeling.app(hosts), port=0)
    listener, base = listen(server)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    try:
        yield addresses(labeling, base)
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


class Browser:
    """What the page's script does, without a browser."""

    def __init__(self, address: str) -> None:
        self.address = address
        base, _, token = address.partition("/?token=")
        self.http = httpx.Client(
            base_url=base,
            headers={"Authorization": f"Bearer {token}"},
            limits=httpx.Limits(
                max_keepalive_connections=0
            ),  # no socket is left to the garbage collector
        )

    def post(self, path, body=None, **headers):
        return self.http.post(path, json=body or {}, headers=headers)

    def state(self):
        return self.post("/state").json()

    def answer(self, trial, **answers):
        return self.post("/answer", {"trial": trial, "answers": answers, "seconds": 1.5})

    def clips(self, state):
        """The bytes of the left and the right clip."""
        return [self.http.get(f"/clips/{number}").content for number in state["clips"]]
