"""A failing reward names the line of the user's file, and its traceback is printed once."""

import pytest
import torch

from sage_grpo import plugins
from sage_grpo.rewards.base import Composite, Setup
from sage_grpo.rewards.build import build_rewards

CLIP = torch.zeros(5, 4, 4, 3, dtype=torch.uint8)
SOURCE = """\
import torch

def pick(values):
    return values[3]

def boom(clips, prompts):
    return [pick([]) for clip in clips]

def shapes(clips, prompts):
    return torch.zeros(2, 3) @ torch.zeros(2, 3)

def ends(clips, prompts):
    raise SystemExit(3)

def few(clips, prompts):
    return [0.5]
"""


@pytest.mark.parametrize(
    ("name", "error", "place"),
    [
        ("boom", "IndexError: list index out of range", ":4 in pick)"),
        ("shapes", "RuntimeError: mat1 and mat2", ":10 in shapes)"),
        ("ends", "RuntimeError: it tried to end the program", ":13 in ends)"),
        ("few", "ValueError: few has shape (1,) for 2 clips", ""),  # no line of the file raised it
    ],
)
def test_the_sentence_names_the_line_and_the_log_has_the_traceback(
    tmp_path, monkeypatch, capsys, name, error, place
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(SOURCE)
    plugin = f"{tmp_path}/mine.py:{name}"
    plugins.trust(plugin)
    reward = Composite(build_rewards([plugin], Setup(tmp_path, torch.device("cpu"))), None)

    for _ in range(2):
        (sentence,) = reward.score([CLIP, CLIP], ["p", "p"], 8.0).errors
        assert sentence.startswith(f"{name}: {error}")
        assert sentence.endswith(f" (mine.py{place}" if place else "clips")
    log = capsys.readouterr().err
    assert log.count("Traceback (most recent call last)") >= 1
    assert log.count(f"note: the reward {name} failed:") == 1
    if place:
        assert f'mine.py", line {place[1 : place.index(" ")]}' in log
