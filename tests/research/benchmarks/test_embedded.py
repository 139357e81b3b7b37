"""The benchmark of the embedded model: a row for each way, with exact first ratios, and a row's arithmetic."""

from pathlib import Path

import pytest

from research.benchmarks import embedded

ROOT = Path(__file__).parents[3]
LIGHT = "--num_sampling_steps 2 --num_frames 5 --height 16 --width 16 --batch_size 4 --num_generations 2 --max_steps 2"


@pytest.mark.slow
def test_each_way_has_a_row(tmp_path):
    """Slow: a run of each way; a row is tested from numbers."""
    prompts, ways = tmp_path / "prompts.txt", ["one prompt per forward", "recipe"]
    prompts.write_text("a small red circle\na large blue square\n")
    files = [
        "--config",
        ROOT / "configs/tiny_gpu.yaml",
        "--pretrained_model_root",
        ROOT / "assets/tiny",
    ]
    files += [
        "--train_prompts",
        prompts,
        "--validation_prompts",
        prompts,
        "--output",
        tmp_path / "page.md",
    ]
    flags = [*LIGHT.split(), "--device", "cpu", "--reward_model", "shapes"]
    embedded.main([*map(str, files), *flags, "--ways", *ways])
    lines = [line.split(" | ") for line in (tmp_path / "page.md").read_text().splitlines()]
    rows = [line for line in lines if line[0].removeprefix("| ") in ways]
    assert [row[0] for row in rows] == [f"| {way}" for way in ways]
    for row in rows:
        assert len(row) == len(lines[6]) and float(row[6]) > 0 and float(row[9]) == 0
    assert rows[0][8] == "**1.0**"


def test_a_row_counts_per_minute():
    found = dict.fromkeys(embedded.PHASES, 0.1) | {"deviation": 0.0, "in all": 12.3}
    assert embedded.row("way", found, 2.0).endswith("| 0.500 | 120 | **4.0** | 0 | 12 |")


@pytest.mark.parametrize("way", embedded.WAYS.values())
def test_the_ways_are_flags_of_the_recipe(way):
    embedded.parse(
        ["--config", str(ROOT / "configs/tiny_gpu.yaml"), *way.split(), *embedded.FIXED.split()]
    )
