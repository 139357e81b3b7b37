"""Numbers for the diagnosis: right on cases with a known answer, recorded by every run, the same on all ranks."""

import json
import math

import pytest
import torch

from sage_grpo.config.parse import from_values
from sage_grpo.parallel.ranks import Ranks
from sage_grpo.train.build import build_trainer
from sage_grpo.train.diagnosis_metrics import HalfGradient, same_reward, thumbnail, variety
from tests.dist import run_ranks
from tests.smallest_run import slow

NAMES = {"advantage_size", "gradient", "weight_rms", "anchor_moved", "variety", "same_reward"}
OF_RESCORING = {"rescoring", "call_difference", "call_sorted", "call_failures", "call_score"}


def measured_share(signal, noise, pairs=8, updates=400, size=50):
    """Mean share over many updates; signal and noise are squared norms of the sum over their pairs."""
    generator, total = torch.Generator().manual_seed(0), 0.0
    weight = torch.zeros(size, dtype=torch.float64, requires_grad=True)
    half, squares = HalfGradient([weight], Ranks(0, 1, torch.device("cpu")), False), 0.0
    mean = torch.full((size,), math.sqrt(signal / size), dtype=torch.float64) / pairs
    for _ in range(updates):
        weight.grad = torch.zeros_like(weight)
        for done in range(1, pairs + 1):
            drawn = torch.randn(size, generator=generator, dtype=torch.float64)
            weight.grad += mean + drawn * math.sqrt(noise / size / pairs)
            half.record_if_half(done, pairs)
        norm = weight.grad.norm().item()
        half.estimate_signal(norm)
        total, squares = total + half.signal_fraction * norm**2, squares + norm**2
    return total / squares


@pytest.mark.parametrize(
    ("signal", "noise", "share"),
    [(1.0, 1.0, 0.5), (1.0, 9.0, 0.1), (0.0, 1.0, 0.0), (1.0, 0.0, 1.0)],
)
def test_signal_and_noise_are_told_apart(signal, noise, share):
    assert measured_share(signal, noise) == pytest.approx(share, abs=0.03)


def test_what_is_not_known_is_none():
    weight = torch.zeros(3, requires_grad=True)
    weight.grad = torch.ones(3)
    for ranks in (Ranks(0, 1, torch.device("cpu"), sp_size=2), Ranks(0, 1, torch.device("cpu"))):
        half = HalfGradient([weight], ranks, False)
        half.record_if_half(1, 1)  # one backward has no half
        half.estimate_signal(weight.grad.norm().item())
        assert half.signal_fraction is None


def test_variety():
    gray, white = (
        torch.full((9, 32, 32, 3), 51, dtype=torch.uint8),
        torch.full((9, 32, 32, 3), 255, dtype=torch.uint8),
    )
    clips = torch.stack([*map(thumbnail, (gray, white, gray, gray))])
    assert variety(clips[:2], 2) == pytest.approx(0.4) and variety(clips[2:], 2) == 0
    assert variety(clips, 2) == pytest.approx(0.4 / math.sqrt(2))
    assert variety(torch.stack([*map(thumbnail, (gray, white, None))]), 3) == pytest.approx(0.4)


def test_a_constant_instead_of_an_error():
    some = torch.tensor([0.1, 0.0, 0.3, 0.0, math.nan], dtype=torch.float64)
    assert same_reward(some) == 0.4
    assert same_reward(torch.tensor([0.0, 0.0, 1.0, 1.0])) == 0  # a reward with few values
    assert same_reward(torch.tensor([0.1, 0.2])) == same_reward(torch.tensor([math.nan])) == 0


def lines(trainer):
    return [
        json.loads(line) for line in (trainer.run.path / "metrics.jsonl").read_text().splitlines()
    ]


def test_a_run_records_them(make):
    trainer = make(max_steps=4, log_interval=2, update_ref_model_step=3)
    trainer.train()
    train = [line for line in lines(trainer) if line["kind"] == "train"]
    found = [{key for key in line if key.startswith("signal/")} for line in train]
    names = {f"signal/{name}" for name in NAMES}
    assert found == [names | {f"signal/{name}" for name in OF_RESCORING}, names]
    first, second = train
    assert 0 < first["signal/anchor_moved"] < 2 * 2 * trainer.config.learning_rate
    assert (
        0 < second["signal/anchor_moved"] < 2 * trainer.config.learning_rate
    )  # refreshed after iteration 3
    assert first["signal/variety"] > 0 and abs(first["signal/gradient"]) < 10
    (validation,) = [line for line in lines(trainer) if line["kind"] == "validation"]
    for line in (first, validation):
        assert line["signal/rescoring"] == line["signal/call_difference"] == 0.0


def blocks_of(trainer):
    """What the blocks of an update hold: the clips of each and its number of backwards; and the number of turns."""
    batch = trainer.roll_out()
    advantages = [torch.ones(trajectory.size) for trajectory in batch]
    turns = range(batch[0].trained_positions.shape[1])
    blocks = trainer.independent_blocks(batch, advantages, turns)
    backwards = [len(block) for block in blocks]
    clips = [
        {clip for backward in block for clip in backward.trajectory.micro_batch} for block in blocks
    ]
    return clips, backwards, len(turns)


@pytest.mark.parametrize("algorithm", ["awm", "nft"])
def test_blocks_of_algorithms_that_share_a_clip_between_levels_hold_different_clips(
    make, algorithm
):
    """Levels of one clip have its x0 in common, and the advantages of a group add up to 0: neither is independent."""
    clips, backwards, num_turns = blocks_of(make(algorithm=algorithm, micro_batch_size=1))
    assert num_turns > 1 and backwards == [2 * num_turns] * 2
    assert len(set.union(*clips)) == sum(len(block) for block in clips) == 4
    assert [len({clip.prompt_index for clip in block}) for block in clips] == [1, 1]


def test_blocks_of_grpo_are_pairs_whose_noise_is_their_own(make):
    clips, backwards, num_turns = blocks_of(make(micro_batch_size=1))
    assert backwards == [1] * (4 * num_turns)
    assert clips[:4] == clips[4:8]  # ordered by step


@pytest.mark.parametrize("algorithm", ["awm", "nft"])
def test_the_signal_is_not_known_from_one_group(make, algorithm):
    trainer = make(algorithm=algorithm, batch_size=2, micro_batch_size=1, validation_interval=0)
    trainer.train()
    train = [line for line in lines(trainer) if line["kind"] == "train"]
    assert [line["signal/gradient"] for line in train] == [None, None]


def two_ranks(ranks, values, broken):
    trainer = build_trainer(from_values(values | {"batch_size": 2}), ranks)
    if ranks.dp_rank == 1 and broken == "weights":
        with torch.no_grad():
            next(iter(trainer.optimization.parameters.values())).add_(1e-3)
    if ranks.dp_rank == 1 and broken == "prompts":
        trainer.fingerprints["training prompts"] = "others"
    trainer.train()
    trainer.run.close()
    return [
        (line["signal/rank_prompts"] > 0, line["signal/rank_weights"] > 0)
        for line in lines(trainer)[1:3]
    ]


@pytest.mark.parametrize(
    ("broken", "seen"),
    [slow("", (False, False)), ("weights", (False, True)), ("prompts", (True, False))],
    ids=str,
)
def test_ranks_that_disagree(flags, broken, seen):
    """Slow: ranks that agree, as those of every other test do."""
    assert run_ranks(2, two_ranks, flags, broken) == [[seen] * 2] * 2
