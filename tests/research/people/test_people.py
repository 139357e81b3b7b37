"""The simulated raters of the proof: they answer by taste, through the page, and see nothing but clips."""

import pytest
import torch

from research.people.page_rater import rate
from research.people.taste import TIE, Rater, open_prompts, ordered_rightly, taste
from sage_grpo.runs.media import write_mp4
from sage_grpo.tools.prefer.answers import read_answers
from sage_grpo.tools.prefer.blinding import padded
from sage_grpo.worlds.shapes.scenes import Scenes, parse, render
from sage_grpo.worlds.shapes.world import as_uint8
from tests.tools.prefer.studies import new_study, serving

SIDE = 48
# imageio's reader leaves the pipes of its ffmpeg process to the garbage collector
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")


def drawn(size, radius, x):
    """A circle (1, F, H, W, 3) at a place."""
    classes = dict.fromkeys(
        ("colour", "shape", "direction", "speed", "background"), torch.tensor([0])
    )
    values = {"x": x, "y": 0.5, "radius": radius, "travel": 0.12}
    numbers = {name: torch.tensor([value]) for name, value in values.items()}
    scenes = Scenes(**classes, size=torch.tensor([size]), **numbers)
    return as_uint8(render(scenes, 9, SIDE, SIDE))


LIKED = drawn(1, 0.24, 0.5)
DISLIKED = drawn(0, 0.14, 0.25)


def test_large_shapes_are_liked():
    liked, disliked = taste(torch.cat([LIKED, DISLIKED])).tolist()
    assert liked - disliked > 3 * TIE


def test_a_rater_reads_the_files_and_errs_as_often_as_told(tmp_path):
    for name, clip in {"good": LIKED, "bad": DISLIKED}.items():
        write_mp4(tmp_path / f"{name}.mp4", clip[0], 8)
    good, bad = tmp_path / "good.mp4", tmp_path / "bad.mp4"
    exact = Rater(noise=0.0, seed=0, side=SIDE)
    assert exact.choose(good, bad) == "left"
    assert exact.choose(bad, good) == "right"
    assert exact.choose(good, good) == "tie"
    careless = Rater(noise=1.0, seed=0, side=SIDE)
    careless.likings = lambda files: [{good: 9.0, bad: 0.0}[file] for file in files]
    answers = [careless.choose(good, bad) for _ in range(300)]
    assert all(70 < answers.count(choice) < 130 for choice in ("left", "right", "tie"))


def test_a_clip_is_known_again_whatever_its_padding(tmp_path):
    write_mp4(tmp_path / "clip.mp4", LIKED[0], 8)
    video = (tmp_path / "clip.mp4").read_bytes()
    rater = Rater(noise=0.0, seed=0, side=SIDE)
    likings = []
    for extra in (0, 8, 700):
        (tmp_path / "padded.mp4").write_bytes(padded(video, len(video) + extra))
        likings += rater.likings([tmp_path / "padded.mp4"])
    assert len(rater.known) == 1 and len(set(likings)) == 1


def test_prompts_leave_size_and_speed_open():
    prompts = open_prompts(seed=0)
    assert len(set(prompts)) == 504
    assert prompts != open_prompts(seed=1)
    for prompt in prompts[::50]:
        assert set(parse(prompt)) == {"colour", "shape", "direction", "background"}


def test_ordered_rightly_counts_pairs_of_a_group_that_differ():
    assert ordered_rightly([1, 2, 3, 4], [0, 10, 5, 5.1], group=2) == [(0, 1.0)]
    assert ordered_rightly([0, 0, 2, 1], [0, 0, 0, 10], group=2) == [(1, 0.0)]


def test_a_program_rates_through_the_page(tmp_path):
    answers = new_study(tmp_path / "prefs.jsonl", questions=("vq",))
    sizes = []

    def choose(left, right):
        sizes.append((left.stat().st_size, right.stat().st_size))
        return "left"

    with serving(answers) as addresses:
        assert rate(addresses["ann"], choose, "vq") == 3
        assert rate(addresses["ann"], choose, "vq") == 0  # all are answered
    answers.close()
    assert [answer.choices for answer in read_answers(answers.path)[1]] == [{"vq": "left"}] * 3
    assert all(left == right for left, right in sizes)
