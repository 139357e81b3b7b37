"""The side-by-side benchmark on the embedded model: a row for each way, exact first ratios, and a row's arithmetic."""

from pathlib import Path

import pytest

from research.benchmarks import clips as script
from sage_grpo.rewards.registry import REWARDS
from sage_grpo.train import trainer as training

ROOT = Path(__file__).parents[3]
LIGHT = "--num_sampling_steps 4 --sde_window random:1 --same_init_noise True --num_frames 5 --height 16 --width 16"
BATCH = "--batch_size 2 --num_generations 2 --use_lora True --device cpu"


@pytest.mark.slow
def test_each_way_has_a_row(tmp_path, monkeypatch):
    """Slow: a run of each way; a row is tested from numbers."""
    output, prompts = tmp_path / "page.md", tmp_path / "prompts.txt"
    monkeypatch.setitem(
        REWARDS, "contrast", None
    )  # the script puts its own there; taken out afterwards
    monkeypatch.setattr(training, "Stopwatch", type("Watch", (training.Stopwatch,), {}))
    prompts.write_text("a small red circle\n")
    extrapolated = []
    count = script.num_trained
    monkeypatch.setattr(
        script, "num_trained", lambda size, share: extrapolated.append(share) or count(size, share)
    )
    files = [
        "--config",
        ROOT / "configs/tiny_cpu.yaml",
        "--pretrained_model_root",
        ROOT / "assets/tiny",
    ]
    files += ["--train_prompts", prompts, "--validation_prompts", prompts, "--output", output]
    ways = ["all steps", "recipe, fp8", "nft", "awm, 2 of 8"]
    words = [*map(str, files), *LIGHT.split(), *BATCH.split(), "--ways"]
    script.main([*words, *ways[:2]])
    first_rows = output.read_text().splitlines()[-2:]
    script.main([*words, *ways])  # the first two are not measured again
    assert set(first_rows) < set(output.read_text().splitlines())
    rows = [
        line.split(" | ")
        for line in output.read_text().splitlines()
        if line.startswith(tuple(f"| {w}" for w in ways))
    ]
    assert [row[0].removeprefix("| ") for row in rows] == ways
    assert set(extrapolated) == {
        0.1
    }  # of all steps alone: the others train no share of their steps for the benchmark
    for row in rows:
        anchor, update, deviation = float(row[5]), float(row[6]), float(row[-2])
        assert anchor > 0 and update > 0 and deviation == 0
    overlaps = [row[-1].removesuffix("|").strip() for row in rows]
    assert float(overlaps[0]) > 0 and set(overlaps[1:]) == {""}  # it is the same for all ways


def test_a_row_counts_per_clip_and_per_hour():
    seconds = {"rollout": 10.0, "decode": 4.0, "reward": 0.0, "anchor": 2.0, "update": 8.0}
    warmed = script.Warmed(forward=0.9, lossy=0.8, overlap=0.95)
    row = script.Result(seconds, 2, 0.01, 39.5, 0.0, warmed).row("way")
    rest = "1.00% | 0.900 | 0.800 | 39.5 | 0 | 0.95 |"
    assert row == f"| way | 2 | 5.00 | 2.00 | 0.00 | 1.00 | 4.00 | 12.0 | **300** | {rest}"


def test_a_failure_beside_the_forwards_is_raised():
    with pytest.raises(ZeroDivisionError):
        script.side_by_side(lambda: None, lambda: 1 / 0)


@pytest.mark.parametrize("name", script.WAYS)
def test_the_ways_are_flags_of_the_recipe(name):
    config = script.parse(
        ["--config", str(ROOT / "configs/hunyuan15_1gpu_lora.yaml"), *script.WAYS[name].split()]
    )
    assert (config.algorithm == "grpo" and config.sde_window == "all") == (name == "all steps")
    assert config.algorithm == (
        name.partition(",")[0] if name.startswith(("awm", "nft")) else "grpo"
    )
