"""The full-size benchmark on the embedded model: same trainer, its phases, and the transformer's share of them."""

from pathlib import Path

import pytest

from research.benchmarks import grpo as script
from sage_grpo.rewards.registry import REWARDS
from sage_grpo.train import saving

ROOT = Path(__file__).parents[3]
SMALL = "--height 16 --width 16"
LIGHT = (
    "--batch_size 2 --num_generations 2 --num_sampling_steps 3 --sde_window all --num_frames 5 "
    f"{SMALL} --use_lora True"
)


@pytest.mark.slow
def test_it_measures_a_run(tmp_path, monkeypatch):
    """Slow: the whole program on the tiny model."""
    output, prompts = tmp_path / "page.md", tmp_path / "prompts.txt"
    monkeypatch.setitem(
        REWARDS, "contrast", None
    )  # the script puts its own there; taken out afterwards
    monkeypatch.setattr(
        script.training, "Stopwatch", type("Watch", (script.training.Stopwatch,), {})
    )
    monkeypatch.setattr(
        saving.Saves, "write", lambda *_: pytest.fail("a benchmark needs no checkpoint")
    )
    prompts.write_text("a small red circle\n")
    files = [
        "--config",
        ROOT / "configs/tiny_cpu.yaml",
        "--pretrained_model_root",
        ROOT / "assets/tiny",
    ]
    files += ["--train_prompts", prompts, "--validation_prompts", prompts, "--output", output]
    script.main(
        [*map(str, files), *LIGHT.split(), "--timestep_fraction", "0.4", "--max_steps", "2"]
    )
    text = output.read_text()
    rows = [
        line.split("|")[1:-1] for line in text.splitlines() if line.startswith(("| 1 ", "| 2 "))
    ]
    assert [row[0].strip() for row in rows] == ["1", "2"] and all(
        float(row[-1]) == 0 for row in rows
    )
    assert all(
        float(row[1]) > 0 and float(row[5]) > 0 for row in rows
    )  # rollout and update took their time
    assert (
        "Computed, not run: an iteration that trains all 3 steps" in text
        and "the trainer adds" in text
    )
