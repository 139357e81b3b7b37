"""From Python: every cell of docs/quickstart.ipynb runs, in order."""

import json
import re
from pathlib import Path

import matplotlib
import pytest

from sage_grpo.config.parse import parse
from sage_grpo.train import limits
from tests.smallest_run import DEMO, write_smaller_demo

ROOT = Path(__file__).parents[1]


def notebook():
    return json.loads((ROOT / "docs/quickstart.ipynb").read_text())["cells"]


def code_cells():
    return ["".join(cell["source"]) for cell in notebook() if cell["cell_type"] == "code"]


def test_every_cell_compiles_and_its_flags_exist(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert not any(cell.get("outputs") for cell in notebook())  # results do not belong here
    for number, cell in enumerate(code_cells()):
        compile(cell, f"cell {number}", "exec")
    [flags] = re.findall('flags = "(.*)"', code_cells()[0])
    assert parse(flags.split()).max_steps == 8


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # of imageio
def test_every_cell_runs(tmp_path, monkeypatch):
    """Slow: trains, reports and samples; the cells' syntax and flags are checked above."""
    (tmp_path / "assets" / "tiny").mkdir(parents=True)
    for path in (ROOT / "assets" / "tiny").iterdir():
        (tmp_path / path.relative_to(ROOT)).symlink_to(path)
    (tmp_path / "configs").mkdir()
    write_smaller_demo(tmp_path / "configs" / DEMO.name)
    for prompts in (tmp_path / "assets" / "tiny").glob("prompts*"):  # a few are enough
        lines = prompts.read_text().splitlines()[:6]
        prompts.unlink()
        prompts.write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(limits, "NUM_DRAWN", 2)
    matplotlib.use("agg")
    names: dict = {}
    for number, cell in enumerate(code_cells()):
        cell = cell.replace("--max_steps 8", "--max_steps 1").replace("step-000008", "step-000001")
        exec(compile(cell, f"cell {number}", "exec"), names)
    assert names["run"].full_lines[-1]["step"] == 1 and names["trainer"].reward.names == ("calm",)
