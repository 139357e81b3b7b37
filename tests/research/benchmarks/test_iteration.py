"""The benchmark: its loops compute the same, and its page has every phase. Nothing here is timed."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch
from diffusers import HunyuanVideo15Pipeline

from research.benchmarks import iteration as bench
from sage_grpo.config.fields import Config, ConfigError

ROOT = Path(__file__).parents[3]
SMALL = "--batch_size 4 --height 16 --width 16 --reward_model shapes"
LIGHT = f"--iterations 1 --num_generations 2 --num_sampling_steps 2 --num_frames 5 {SMALL} --guidance_scale 2"
# of torch and its friends, about what this script cannot change
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def run(folder: Path) -> str:
    """The page of a run with little padding, which is what takes the time."""
    prompts, output = folder / "prompts.txt", folder / "result.md"
    lines = (ROOT / "assets" / "tiny" / "prompts_train.txt").read_text().splitlines()[:8]
    prompts.write_text("\n".join(lines))
    model = [
        "--config",
        f"{ROOT}/configs/tiny_cpu.yaml",
        "--pretrained_model_root",
        f"{ROOT}/assets/tiny",
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "STOCK", bench.Padding(text=30, glyph=14, image=3))
        bench.main(
            [*model, *LIGHT.split(), "--train_prompts", str(prompts), "--output", str(output)]
        )
    return output.read_text()


def outcome() -> "bench.Outcome":
    return bench.Outcome({}, torch.ones(2, 3), torch.ones(2), torch.ones(5))


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return run(tmp_path_factory.mktemp("bench"))


@pytest.mark.slow
def test_both_plain_loops_compute_what_the_trainer_does(page):
    """Slow: the real loops; the comparison is tested with numbers."""
    lines = re.findall(
        r"^- (.*): latents differ by (\S+), rewards by (\S+), the gradient by (\S+) of",
        page,
        re.MULTILINE,
    )
    assert [name for name, *_ in lines] == ["plain", "plain, short"]
    for _, latents, rewards, gradient in lines:
        assert float(latents) < 5e-5 and float(rewards) < 1e-3 and float(gradient) < 1e-3


@pytest.mark.slow
def test_the_table_has_every_phase_and_adds_up(page):
    """Slow: real iterations; the page is tested from records."""
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines()]
    rows = {cells[0]: cells[1:] for cells in lines if len(cells) == 6 and "---" not in cells[0]}
    assert list(rows) == ["phase", *bench.PHASES, "total"]
    for column in (0, 1, 3):
        parts = [float(rows[phase][column]) for phase in bench.PHASES]
        assert sum(parts) == pytest.approx(float(rows["total"][column]), abs=0.05)
    busy = ("text encoding", "rollout", "decode", "reward", "reference/anchor", "update", "other")
    assert all(float(rows[phase][1]) >= 0 for phase in busy) and float(rows["gold metrics"][1]) == 0
    assert all(
        float(rows[phase][column]) > 0
        for phase in ("rollout", "decode", "update")
        for column in (0, 1, 3)
    )


@pytest.mark.slow
def test_the_page_says_what_was_run(page):
    """Slow: real iterations; the page is tested from records."""
    assert "4 clips in groups of 2, 2 steps, guidance 2, all weights trained" in page
    assert "    python -m research.benchmarks.iteration --config" in page and LIGHT in page
    assert "padded to 30 text, 14 glyph and 3 image tokens" in page
    assert "1 iteration of 10" in page


@pytest.mark.parametrize(
    "part, error", [("latents", 1e-3), ("rewards", 0.1), ("gradient", 0.1), ("latents", torch.nan)]
)
def test_loops_that_differ_are_refused(part, error):
    assert "differ by 0.0e+00" in bench.check_equal(outcome(), outcome())
    wrong = dataclasses.replace(outcome(), **{part: getattr(outcome(), part) + error})
    with pytest.raises(RuntimeError, match="do not compute the same"):
        bench.check_equal(outcome(), wrong)


@pytest.mark.slow
def test_a_plain_loop_that_is_slightly_wrong_is_caught(tmp_path, monkeypatch):
    """Slow: the real loops; the comparison is tested with numbers."""
    forward = bench.PlainLoop.forward
    monkeypatch.setattr(bench.PlainLoop, "forward", lambda *arguments: 1.001 * forward(*arguments))
    with pytest.raises(RuntimeError, match="do not compute the same"):
        run(tmp_path)
    assert not (tmp_path / "result.md").exists()


def test_the_padding_is_the_stock_pipelines_own():
    pipe = HunyuanVideo15Pipeline.from_pretrained(
        ROOT / "assets" / "tiny", dtype=torch.float32, local_files_only=True
    )
    own = (pipe.tokenizer_max_length, pipe.tokenizer_2_max_length, pipe.vision_num_semantic_tokens)
    assert own == bench.STOCK


@pytest.mark.parametrize(
    "flag, value", [("updates_per_rollout", 2), ("timestep_fraction", 0.5), ("kl_weight", 0.0)]
)
def test_work_that_the_plain_loop_lacks_is_refused(flag, value):
    with pytest.raises(ConfigError, match="plain loop"):
        bench.refuse_other_work(dataclasses.replace(Config(dtype="fp32"), **{flag: value}))
    bench.refuse_other_work(Config(dtype="fp32"))
