"""Every second block of the benchmark has a checkpoint, and its page adds up. Nothing here is timed."""

from pathlib import Path

import pytest

from research.benchmarks import checkpoint as bench
from sage_grpo.train import saving

ROOT = Path(__file__).parents[3]
SMALL = "--height 16 --width 16 --reward_model shapes"
LIGHT = f"--batch_size 2 --num_generations 2 --num_sampling_steps 2 --num_frames 5 {SMALL} --pairs 1 --save_interval 1"


@pytest.mark.slow
def test_every_second_block_is_saved(tmp_path, monkeypatch):
    """Slow: a real run; the page is tested from records."""
    monkeypatch.chdir(tmp_path)
    model = [
        "--config",
        f"{ROOT}/configs/tiny_cpu.yaml",
        "--pretrained_model_root",
        f"{ROOT}/assets/tiny",
    ]
    saved, blocks, measure, save = [], [], bench.measure, saving.Saves.write

    def watched(trainer):
        blocks.extend(measure(trainer))
        return blocks

    monkeypatch.setattr(
        saving.Saves, "write", lambda it, *rest: saved.append(it.state.step) or save(it, *rest)
    )
    monkeypatch.setattr(bench, "measure", watched)
    bench.main([*model, *LIGHT.split(), "--output", "page.md"])
    assert saved == [1, 3] and len(blocks) == 4 and blocks[2].save > blocks[3].save
    page = Path("page.md").read_text()
    assert (
        "A checkpoint of 162.6 MB takes" in page
        and f"{blocks[2].save:.3f} s in the median, every 1 iterations" in page
    )
    assert list(Path("outputs").iterdir()) == []


def test_the_page_counts_right():
    blocks = [bench.Block(9, 9), bench.Block(9, 0)]  # of the warm-up
    blocks += [
        block for extra in (0, 1, 2) for block in (bench.Block(20 + extra, 0.5), bench.Block(20, 0))
    ]
    page = bench.report(blocks, 10, 3.0, "about")
    assert "takes 0.500 s in the median, every 10 iterations of 2.00 s: **2.50 %**" in page
    assert "took +7.50 ± " in page and "| 21.00 | 0.500 | 20.00 |" in page
    assert float(page.split("± ")[1].split()[0]) == pytest.approx(4.303 * 5 / 3**0.5, abs=0.01)
