"""From Python: every cell of docs/quickstart.ipynb runs, in order, and so do the lines of the README."""

import json
import re
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
    monkeypatch.setattr(build, "DRAWN", 2)
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


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # of imageio
def test_the_lines_of_the_readme_train_and_show_the_metrics(tmp_path, monkeypatch, capsys):
    """With fewer clips, and an output folder that is thrown away."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(build, "DRAWN", 2)
    blocks = re.findall(
        r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL
    )
    (lines,) = (block for block in blocks if "build_trainer" in block)
    fewer = '"--num_validation_prompts", "2", "--batch_size", "8", "--overwrite"'
    assert lines.count('"outputs/api"') == lines.count('"--overwrite"') == 1
    exec(
        lines.replace('"outputs/api"', f'"{tmp_path / "api"}"').replace('"--overwrite"', fewer), {}
    )
    before, after = map(float, capsys.readouterr().out.strip().splitlines()[-1].strip("[]").split())
    assert before != after
