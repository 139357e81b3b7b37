"""The tables of research/benchmarks/scaling.md match the planner's output, and a stale one is detected."""

import pytest

from research.benchmarks import scaling_tables as script


def test_the_page_is_what_the_planner_says():
    text = script.PAGE.read_text()
    assert len(script.BLOCK.findall(text)) >= 8
    assert script.refreshed(text) == text


def test_a_stale_table_is_made_anew():
    command = "$ python -m sage_grpo.tools.plan --config configs/hunyuan15_1gpu_lora.yaml \\\n  --vary num_frames 49\n"
    found = script.refreshed(f"before\n```\n{command}old numbers\n```\nafter\n")
    assert found.startswith(f"before\n```\n{command}num_frames  tokens") and found.endswith(
        "\n```\nafter\n"
    )
    assert "49          11,304" in found and "old numbers" not in found


def test_a_command_that_cannot_run_is_refused(capsys):
    with pytest.raises(ValueError, match="cannot run: --gpus 0"):
        script.output_of("--gpus 0")
