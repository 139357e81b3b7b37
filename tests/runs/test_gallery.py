"""The best and the worst clip of a group, kept small and few, and never in the way of a run."""

import json
import math
from itertools import pairwise

import pytest
import torch

from sage_grpo.runs import gallery
from sage_grpo.runs.gallery import FILES, Gallery, extremes, read_gallery, record_of, small
from sage_grpo.runs.media import read_mp4
from tests.smallest_run import slow

# of imageio, which reads them
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
NAN = math.nan


@pytest.mark.parametrize(
    ("totals", "groups", "expected"),
    [
        ([1.0, 3.0, 2.0, 9.0], "aabb", (3, 2)),  # the group whose rewards differ most
        ([1.0, NAN, 0.5, NAN], "aabb", None),  # a group of one has no worst
        ([NAN, 2.0, 1.0, 5.0], "aaab", (1, 2)),
        ([2.0, 2.0], "aa", None),
        ([], "", None),
    ],
)
def test_the_group_with_the_widest_rewards_is_shown(totals, groups, expected):
    assert extremes(totals, list(groups)) == expected


def test_clips_are_shrunk_and_thinned():
    frames, fps = small(torch.zeros(121, 480, 848, 3, dtype=torch.uint8), 24)
    assert (tuple(frames.shape), fps) == ((41, 182, 320, 3), 8)
    tiny = torch.randint(0, 256, (9, 48, 48, 3), dtype=torch.uint8)
    frames, fps = small(tiny, 8)
    assert torch.equal(frames, tiny) and fps == 8


@pytest.fixture
def unrendered(monkeypatch):
    """Videos without ffmpeg."""
    monkeypatch.setattr(gallery, "write_mp4", lambda path, clip, fps, crf: path.write_bytes(b"mp4"))


CLIPS = [torch.zeros(2, 16, 16, 3, dtype=torch.uint8)] * 2
RECORDS = [record_of("a red circle", n, {"VQ": 1.0 - n, "total": NAN}) for n in (0, 1)]


def test_no_more_than_asked_are_kept_and_always_the_first_and_the_newest(tmp_path, unrendered):
    kept = Gallery(tmp_path, 4)
    for step in range(1, 40):
        kept.write(step, CLIPS, RECORDS, 8)
        steps = list(read_gallery(tmp_path))
        assert len(steps) <= 4 and steps[0] == 1 and steps[-1] == step
    assert list(read_gallery(tmp_path, 20)) == [step for step in steps if step <= 20]
    gaps = [after - before for before, after in pairwise(steps)]
    assert max(gaps) <= 20  # of 38


def test_a_folder_of_another_spelling_is_thinned_out_too(tmp_path, unrendered):
    (tmp_path / "rollouts" / "step-5").mkdir(parents=True)
    kept = Gallery(tmp_path, 2)
    for step in (4, 6):
        kept.write(step, CLIPS, RECORDS, 8)
    assert list(read_gallery(tmp_path)) == [4, 6]
    assert not (tmp_path / "rollouts" / "step-5").exists()


def test_what_is_written_is_read_back_and_what_is_damaged_is_left_out(tmp_path, unrendered):
    kept = Gallery(tmp_path, 9)
    for step in range(1, 6):
        kept.write(step, CLIPS, RECORDS, 8)
    folder = tmp_path / "rollouts"
    (folder / "step-000002" / "clips.json").write_text("[{")
    (folder / "step-000003" / FILES[0]).unlink()
    (folder / "step-000004" / "clips.json").write_text(
        json.dumps([RECORDS[0] | {"file": "../../../secret"}] * 2)
    )
    (folder / "step-000007").symlink_to(folder / "step-000001")
    pairs = read_gallery(tmp_path)
    assert list(pairs) == [1, 5]
    best, worst = pairs[1]
    assert (best.path.name, worst.path.name) == FILES
    assert (best.values["reward/VQ"], worst.values["reward/VQ"]) == (1.0, 0.0)
    assert best.prompt == "a red circle" and math.isnan(best.reward)


@pytest.mark.parametrize(
    "more", [slow({}), {"batch_size": 8, "num_generations": 4, "train_clips": 2}]
)
def test_a_run_keeps_the_best_and_the_worst_of_its_rollouts(make, more):
    """With real videos: their scores are those of the iteration, and training gives the same numbers without them.

    Slow: all clips are trained.
    """
    trainer = make(max_steps=2, rollout_videos=5, **more)
    trainer.train()
    trainer.run.close()
    pairs = read_gallery(trainer.run.path)
    assert pairs.keys() <= {1, 2} and pairs
    for best, worst in pairs.values():
        assert best.reward > worst.reward
        assert best.prompt == worst.prompt and best.prompt in {r.text for r in trainer.requests}
        clip, _ = read_mp4(best.path)
        assert clip.shape[0] == trainer.config.num_frames
        assert best.path.stat().st_size < 200_000

    elsewhere = str(trainer.run.path) + "_without"
    without = make(max_steps=2, rollout_videos=0, output_dir=elsewhere, **more)
    without.train()
    expected = without.optimization.parameters
    for name, value in trainer.optimization.parameters.items():
        assert torch.equal(value, expected[name])
    assert not (without.run.path / "rollouts").exists()


def test_a_full_disk_costs_clips_and_not_the_run(make, monkeypatch):
    def full(*arguments):
        raise OSError("No space left on device")

    monkeypatch.setattr(gallery, "write_mp4", full)
    trainer = make(max_steps=3, rollout_videos=5)
    trainer.train()
    assert trainer.step == 3
