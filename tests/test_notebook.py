"""From Python: every cell of docs/quickstart.ipynb runs, in order."""

import json
from pathlib import Path

import matplotlib
import pytest

from sage_grpo.train import build

ROOT = Path(__file__).parents[1]


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # of imageio
def test_every_cell_runs(tmp_path, monkeypatch):
    (tmp_path / "assets" / "tiny").mkdir(parents=True)
    for path in (ROOT / "configs", *(ROOT / "assets" / "tiny").iterdir()):
        (tmp_path / path.relative_to(ROOT)).symlink_to(path)
    for prompts in (tmp_path / "assets" / "tiny").glob("prompts*"):  # a few are enough
        lines = prompts.read_text().splitlines()[:6]
        prompts.unlink()
        prompts.write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(build, "NUM_DRAWN", 2)
    matplotlib.use("agg")
    cells = json.loads((ROOT / "docs/quickstart.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert all(
        not cell.get("outputs") for cell in cells
    )  # a repository holds no results of a notebook
    names: dict = {}
    for number, cell in enumerate(code):
        cell = cell.replace("--max_steps 8", "--max_steps 1").replace("step-000008", "step-000001")
        exec(compile(cell, f"cell {number}", "exec"), names)
    assert names["run"].train[-1]["step"] == 1 and names["trainer"].reward.names == ("calm",)
