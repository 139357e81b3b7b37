"""Windows of exploration: where they lie, what they cost, and that nothing but their place changes what is learned."""

import json

import pytest
import torch

from sage_grpo.algo.equalizer import equalizer
from sage_grpo.algo.sde import build_schedule, flow_sigmas
from sage_grpo.algo.solver import ode_tables
from sage_grpo.config.windows import parse_window
from sage_grpo.models.backbone import Backbone
from sage_grpo.models.sample import integrate
from sage_grpo.train.windows import build_windows
from tests.smallest_run import on_tiny, slow

ALL = torch.ones(5, dtype=torch.bool)


@pytest.mark.parametrize(
    "text, step, expected",
    [
        ("all", 0, [0, 1, 2, 3, 4]),
        ("all_but_last", 7, [0, 1, 2, 3]),
        ("slide_iteration:2", 24, [0, 1]),
        ("slide_iteration:2", 25, [1, 2]),
        ("slide_iteration:2:10", 39, [3, 4]),
        ("slide_iteration:2:10", 40, [0, 1]),
        ("slide:5:1", 3, [0, 1, 2, 3, 4]),
    ],
)
def test_places(text, step, expected):
    windows = build_windows(parse_window(text), ALL, seed=0)
    start = windows.start(step, prompt_index=7, group=0)
    assert list(range(start, start + windows.size)) == expected


def test_a_random_window_differs_between_prompts_groups_and_iterations():
    windows = build_windows(parse_window("random:2"), ALL, seed=1)
    assert {windows.start(step, 0, 0) for step in range(40)} == {0, 1, 2, 3}
    assert {windows.start(0, prompt, 0) for prompt in range(40)} == {0, 1, 2, 3}
    assert {windows.start(0, 0, group) for group in range(40)} == {0, 1, 2, 3}
    whole = build_windows(parse_window("random_iteration:2"), ALL, seed=1)
    assert len({whole.start(3, prompt, group) for prompt in range(9) for group in range(9)}) == 1
    assert {whole.start(step, 0, 0) for step in range(40)} == {0, 1, 2, 3}


def coverage(text, stochastic=ALL):
    """How often each step is in one of the windows that can be drawn."""
    windows = build_windows(parse_window(text), stochastic, seed=0)
    drawn = {windows.start(step, 0, 0) for step in range(200)}
    assert drawn == set(windows.starts)
    counts = [0] * len(stochastic)
    for start in windows.starts:
        for step in range(start, start + windows.size):
            counts[step] += 1
    assert [step for step, count in enumerate(counts) if count] == list(windows.steps)
    return counts


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("random:2", [1, 2, 2, 2, 1]),
        ("random:2:all_but_last", [1, 2, 2, 1, 0]),
        ("slide:2:1:all_but_last", [1, 2, 2, 1, 0]),
        ("random:2:all_but_last:even", [1, 1, 1, 1, 0]),
        ("random_iteration:2:even:all_but_last", [1, 1, 1, 1, 0]),
        ("random:1:even", [1, 1, 1, 1, 1]),
    ],
)
def test_steps_that_windows_cover(text, counts):
    assert coverage(text) == counts


def test_windows_that_cannot_be_even_are_refused():
    with pytest.raises(ValueError, match="5 steps can explore, which 2 does not divide"):
        build_windows(parse_window("random:2:even"), ALL, seed=0)


@pytest.mark.parametrize("tail_steps, second_order", [(5, 2), (4, 1), (3, 0)])
def test_steps_of_second_order_from_pure_noise(tail_steps, second_order):
    """As the help of tail_steps says: the first two and the last are Euler's."""
    from_noise = ode_tables(flow_sigmas(tail_steps, 5.0), "dpm").history
    after_window = ode_tables(flow_sigmas(tail_steps, 5.0, 0.9), "dpm").history
    assert int((from_noise != 0).sum()) == second_order
    assert int((after_window != 0).sum()) == second_order + 1


def test_sliding_windows_advance_together_from_places_of_their_own():
    windows = build_windows(parse_window("slide:2:10"), ALL, seed=1)
    now, later = ([windows.start(step, prompt, 0) for prompt in range(40)] for step in (5, 15))
    assert set(now) == {0, 1, 2, 3} and [(start + 1) % 4 for start in now] == later


def test_windows_lie_where_the_sampler_has_noise():
    stochastic = torch.tensor([False, True, True, True, False])
    assert build_windows(parse_window("all"), stochastic, 0).steps == range(1, 4)
    assert {
        build_windows(parse_window("random:2"), stochastic, 0).start(step, 0, 0)
        for step in range(40)
    } == {
        1,
        2,
    }
    with pytest.raises(ValueError, match="SIZE of 4; it can be at most 3"):
        build_windows(parse_window("random:4"), stochastic, 0)
    with pytest.raises(ValueError, match="no stochastic step"):
        build_windows(parse_window("all"), ~ALL, 0)


def test_noisy_steps_that_are_apart_are_refused():
    """A window is a range: it would train steps without noise, and never explore the last ones that have some."""
    apart = torch.tensor([True, False, True, False, True])
    with pytest.raises(
        ValueError, match=r"steps 1, 3, 5; the noisy steps .* must follow each other"
    ):
        build_windows(parse_window("all"), apart, seed=0)


WRONG = (
    "",
    "some",
    "random",
    "random:0",
    "random:6",
    "slide:2:0",
    "slide:a",
    "all:2",
    "slide:1:2:3",
    "random:2:3",
)


@pytest.mark.parametrize(
    "text", [*WRONG, "all_iteration", "random_iteration", "all_but_last_iteration:2"]
)
def test_a_wrong_window_is_refused(text):
    with pytest.raises(ValueError, match="sde_window"):
        build_windows(parse_window(text), ALL, seed=0)


def pushes(make, steps):
    """Gradient with respect to the velocity, by step, of windows of one step each."""
    found = {}
    for step in steps:
        trainer = make(
            sde_window="slide_iteration:1:1", num_sampling_steps=4, kl_weight=0.0, overwrite=True
        )
        trainer.validation, trainer.state.step = None, step
        batch = trainer.roll_out()
        assert batch[0].steps.flatten().unique().tolist() == [step]
        record = trainer.update(
            batch, trainer.advantages(type("Scores", (), {"total": torch.tensor([0.0, 1, 0, 1])}))
        )
        found[step] = record["per_step"]["grad_v"][step]
        trainer.run.close()
    return found


def test_two_windows_push_with_the_ratio_of_the_whole_sampler(make):
    """With a median over the window, each would have a scale of 1 and push as hard as its noise is small."""
    found = pushes(make, (0, 2))
    whole = build_schedule("sage_grpo", flow_sigmas(4, 5.0), 0.5)
    plain = pushes(lambda **flags: make(use_grad_balancing=False, **flags), (0, 2))
    scale = equalizer(whole)
    assert found[0] / found[2] == pytest.approx(
        (scale[0] * plain[0] / (scale[2] * plain[2])).item(), rel=1e-4
    )
    assert 0.3 < found[0] / found[2] < 3 < plain[2] / plain[0]


class Forwards:
    """Counts clips and calls of a backbone's velocity."""

    def __init__(self, monkeypatch):
        plain, self.sizes = Backbone.velocity, []
        monkeypatch.setattr(
            Backbone, "velocity", lambda *words: self.sizes.append(len(words[1])) or plain(*words)
        )


@pytest.mark.parametrize("size", [None, 1])
def test_a_shared_way_to_the_window_is_that_of_each_clip(make, monkeypatch, size):
    """To the bit where each clip runs alone; a group of several clips is rounded as its batch shape has it."""
    flags = {
        "sde_window": "slide_iteration:1:1",
        "num_sampling_steps": 4,
        "micro_batch_size": size,
        "overwrite": True,
    }
    shared = make(same_init_noise=True, **flags)
    shared.state.step = 2
    forwards = Forwards(monkeypatch)
    batch = shared.roll_out()
    counted = list(forwards.sizes)
    monkeypatch.setattr("sage_grpo.train.rollout.RolloutSampler.begin", begin_each)
    plain = make(same_init_noise=True, **flags)
    plain.state.step = 2
    each = plain.roll_out()
    ours, theirs = (torch.cat([t.data.x for t in found]) for found in (batch, each))
    if size == 1:
        assert torch.equal(ours, theirs) and counted == 2 * (
            [1] * 2 + [1, 1] + [1, 1]
        )  # the second clip: no way there
    else:
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        assert counted == 2 * ([1] * 2 + [2] + [2])
    assert torch.equal(ours[0, 0], ours[1, 0])
    after = torch.cat([t.data.outcome for t in batch])
    assert not torch.equal(after[0, 0], after[1, 0])


def begin_each(self, x, micro_batch, start, cond):
    return integrate(self.backbone, self.levels_before(start), x, cond, self.guidance)


def test_windows_per_prompt_in_one_forward_are_those_of_each_alone(make, tmp_path):
    """Prompts of equal length share forwards although their windows differ."""
    (tmp_path / "three.txt").write_text(
        "".join(f"a {c} circle moving left\n" for c in ("red", "green", "blue"))
    )
    flags = {
        "batch_size": 6,
        "num_generations": 2,
        "num_sampling_steps": 6,
        "sde_window": "random:2",
    }
    flags |= {
        "tail_steps": 1,
        "train_prompts": str(tmp_path / "three.txt"),
        "overwrite": True,
        "seed": 4,
    }
    clips, lines = [], []
    for together in (1, 3):
        trainer = make(prompts_per_forward=together, same_init_noise=True, max_steps=1, **flags)
        trainer.validation, batch = None, trainer.roll_out()
        assert len(torch.cat([t.steps[:, 0] for t in batch]).unique()) > 1
        names = [clip for t in batch for clip in t.micro_batch]
        rows = sorted(range(6), key=names.__getitem__)
        clips.append(torch.cat([t.data.latents for t in batch])[rows])
        trainer.train()
        lines.append(json.loads((trainer.run.path / "metrics.jsonl").read_text().splitlines()[-1]))
    torch.testing.assert_close(*clips, rtol=1e-4, atol=1e-4)
    assert lines[0]["policy/ratio_max_deviation"] == lines[1]["policy/ratio_max_deviation"] == 0
    assert lines[0]["policy/grad_norm"] == pytest.approx(lines[1]["policy/grad_norm"], rel=2e-2)


def test_the_tail_is_coarse_and_of_second_order(make, monkeypatch):
    flags = {"sde_window": "slide_iteration:2:1", "num_sampling_steps": 8, "overwrite": True}
    trainer = make(tail_steps=3, **flags)
    forwards = Forwards(monkeypatch)
    batch = trainer.roll_out()
    assert forwards.sizes == [2] * (2 + 3) * 2
    x = batch[0].data.outcome[:, -1]
    sigma = trainer.schedule.sigmas[2].item()
    u = [sigma / (5 - 4 * sigma) * part for part in (1, 2 / 3, 1 / 3, 0)]
    levels = [5 * value / (1 + 4 * value) for value in u]
    lam = [torch.tensor((1 - s) / s).double().log() if s else None for s in levels]
    before = None
    for i in range(3):
        velocity = trainer.backbone.velocity(
            x, torch.full((2,), levels[i]), batch[0].cond, trainer.guidance
        )
        clean = guess = x - levels[i] * velocity
        if 0 < i < 2:
            r = (lam[i] - lam[i - 1]) / (lam[i + 1] - lam[i])
            guess = (1 + 1 / (2 * r)) * clean - 1 / (2 * r) * before
        ratio = levels[i + 1] / levels[i]
        x = ratio * x + ((1 - levels[i + 1]) - ratio * (1 - levels[i])) * guess
        before = clean
    torch.testing.assert_close(batch[0].data.latents, x.float(), rtol=1e-4, atol=1e-5)
    trainer.state.step = 6  # the window ends with the sampler: nothing is left to do
    assert torch.equal(
        trainer.roll_out()[0].data.latents, trainer.roll_out()[0].data.outcome[:, -1]
    )


@on_tiny
@pytest.mark.parametrize("use_lora", [True, slow(False)])
def test_steps_outside_the_window_may_be_lossy_and_the_ratio_stays_1(make, tmp_path, use_lora):
    """Slow: with all weights, whose blocks are cast to 8 bits again after each step."""
    flags = {
        "num_sampling_steps": 4,
        "sde_window": "random:1",
        "same_init_noise": True,
        "use_lora": use_lora,
    }
    found = {}
    for kind in ("exact", "fp8"):
        trainer = make(**flags, outside_window=kind, output_dir=str(tmp_path / kind))
        (batch, *_) = trainer.roll_out()
        assert (
            trainer.windows.start(0, batch.micro_batch[0][0], 0) > 0
        )  # there is a way to the window
        found[kind] = batch
        trainer.train()  # stops if the first ratio is not exactly 1
        assert trainer.ratio_checked
    assert torch.equal(found["exact"].steps, found["fp8"].steps)
    for part in ("x", "latents"):
        exact, lossy = (getattr(found[kind].data, part) for kind in ("exact", "fp8"))
        assert 0 < (exact - lossy).norm() / exact.norm() < 0.1
