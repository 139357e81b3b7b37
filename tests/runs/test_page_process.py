"""The page that is refreshed during training: when, and what happens if it cannot be."""

import dataclasses
import signal
import subprocess

import pytest
import torch

from sage_grpo.config.fields import Config
from sage_grpo.parallel.ranks import Ranks
from sage_grpo.runs import folder, page_process
from sage_grpo.runs.folder import RunFolder
from tests.tools.fake_run import write_lines


@pytest.fixture
def run(tmp_path):
    """A run folder with one iteration, whose report can be written at any time."""
    write_lines(tmp_path, [{"kind": "train", "step": 1, "reward/total": 0.5}])
    config = Config(output_dir=str(tmp_path), overwrite=True)
    run_folder = RunFolder(config, Ranks(0, 1, torch.device("cpu")))
    run_folder.report_module = "sage_grpo.tools.report"
    return run_folder


@pytest.mark.slow
def test_the_page_is_refreshed_once_it_is_old(run):
    """Slow: waits for real pages."""
    page = run.path / "report.html"
    run.diagnose(1)
    run.close()
    assert not page.exists()

    run.page.started -= page_process.INTERVAL
    run.diagnose(2)
    run.close()
    assert "<h2>Reward</h2>" in page.read_text()


def test_a_run_without_a_report_module_starts_nothing(run):
    run.report_module = None
    run.page.started -= page_process.INTERVAL
    run.diagnose(1)
    assert run.page.process is None


def test_a_page_that_cannot_be_started_does_not_stop_the_training(run, monkeypatch, capsys):
    monkeypatch.setattr(page_process.sys, "executable", "/nowhere/python")
    run.page.started -= page_process.INTERVAL
    run.diagnose(1)
    assert "report.html cannot be refreshed: [Errno 2]" in capsys.readouterr().err
    run.close()


def test_a_page_that_hangs_is_killed(run, monkeypatch):
    monkeypatch.setattr(page_process, "PATIENCE", 0.1)
    run.page.process = subprocess.Popen(["sleep", "60"])
    run.close()
    assert run.page.process.wait() == -signal.SIGKILL


@pytest.mark.parametrize(
    "lines",
    [
        [{"kind": "run", "step": 0, "ranks": 10**400}],
        [{"kind": "train", "step": 2, "reward/failed": 4, "reward/error": ["x"]}],
        [{"kind": "train", "step": 2, "per_step": {"kl_anchor": 3}}],
        [{"kind": "train", "step": 2, "reward/total": ["x"]}],
        [{"kind": "train", "step": 2, "signal/rank_weights": 1}, {"kind": "run", "step": 5}],
    ],
)
def test_no_line_of_the_metrics_stops_the_training(run, lines):
    (run.path / "config.yaml").write_text("max_steps: 9\n")
    write_lines(run.path, [*lines, {"kind": "train", "step": 6, "reward/total": 0.5}])
    run.diagnose(6)


@pytest.mark.parametrize("error", [RuntimeError("broken"), ZeroDivisionError(), RecursionError()])
def test_nothing_that_a_helper_raises_stops_the_training(run, monkeypatch, capsys, error):
    def broken(*arguments):
        raise error

    for helper in ("diagnose", "divergence"):
        monkeypatch.setattr(folder, helper, broken)
    monkeypatch.setattr(run.page, "refresh", broken)
    run.config = dataclasses.replace(run.config, holdout_reward="motion")
    run.diagnose(1)
    assert run.divergence(1) is None

    notes = capsys.readouterr().err
    for consequence in (
        "report.html cannot be refreshed",
        "no diagnosis",
        "not checked for reward hacking",
    ):
        assert f"{consequence}: {str(error) or type(error).__name__}\n" in notes
