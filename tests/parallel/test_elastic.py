"""A start that is refused under torchrun is not repeated in full by its restarts."""

import subprocess
import sys
from pathlib import Path

import pytest

import post_train
from sage_grpo.config.fields import ConfigError
from sage_grpo.parallel import elastic
from tests.smallest_run import command_line, on_tiny

ROOT = Path(__file__).parents[2]


@pytest.fixture
def attempt(tmp_path, monkeypatch):
    """attempt(number): what torchrun sets for rank 1 of an attempt."""

    def begin(number):
        folder = tmp_path / "run_x" / f"attempt_{number}" / "1"
        folder.mkdir(parents=True)
        monkeypatch.setenv(elastic.VARIABLE, str(folder / "error.json"))

    return begin


def test_a_restart_repeats_the_refusal_before_it_parses_anything(attempt, monkeypatch, capsys):
    attempt(0)
    assert post_train.main(["--etta", "1"]) == 2
    monkeypatch.setattr(post_train, "parse", lambda arguments: pytest.fail("started again"))
    for number in (1, 2):
        attempt(number)
        assert post_train.main(["--etta", "1"]) == 2
    first, *others = capsys.readouterr().err.splitlines()
    assert "unknown flag --etta" in first
    sentence = first.removeprefix("post_train.py: ")
    assert others == [f"post_train.py: refused as before this restart: {sentence}"] * 2


def test_other_failures_are_tried_again(attempt, monkeypatch, capsys):
    """A server or a disk may be back when torchrun restarts; the attempt after a good one knows of no refusal."""
    attempt(0)
    for error in (OSError(5, "Input/output error"), ValueError("no server answers")):
        monkeypatch.setattr(post_train, "parse", lambda arguments, error=error: _raise(error))
        assert post_train.main([]) == 2
    attempt(1)
    assert elastic.earlier_refusal() == ""
    elastic.note_refusal("no")
    attempt(3)
    assert elastic.earlier_refusal() == ""


def _raise(error):
    raise error


def test_without_torchrun_nothing_is_written(tmp_path, monkeypatch, capsys):
    for value in ("", str(tmp_path / "error.json")):
        monkeypatch.setenv(elastic.VARIABLE, value)
        monkeypatch.setattr(post_train, "parse", lambda arguments: _raise(ConfigError("no")))
        assert post_train.main([]) == 2
    assert not list(tmp_path.iterdir())


@on_tiny
@pytest.mark.slow
def test_a_folder_in_use_is_found_once(flags, tmp_path):
    """Slow: a real torchrun with restarts; its fast sibling sets what torchrun would."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    restarts = ["--nproc_per_node", "1", "--max_restarts", "3", "post_train.py"]
    result = subprocess.run(
        [*torchrun, *restarts, *command_line(flags)], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode
    said = result.stderr
    assert said.count("already holds a run") == 4
    assert said.count("refused as before this restart") == 3
