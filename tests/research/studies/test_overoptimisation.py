"""The study of overoptimisation: what is kept of a run, what the figure shows, and what the text says."""

import json

import numpy as np
import pytest

from research.studies import overoptimisation
from research.studies.records import read_lines
from sage_grpo.runs.hacking import divergence
from sage_grpo.runs.history import read_run
from tests.tools import fake_run
from tests.tools.fake_run import make_run

RECORDS = {record["name"]: record for record in read_lines(overoptimisation.KEPT)}
EARLY, LATE, LAST = (80, 120, 160), (360, 400, 440), (1120, 1160, 1200)


@pytest.fixture
def beyond(tmp_path):
    """A run of 200 iterations whose KL grows with the iteration."""
    folder = make_run(tmp_path / "beyond", iterations=200, every=50, prompts=2)
    lines = fake_run.read_lines(folder)
    for line in lines:
        if line["kind"] == "train":
            line["kl/anchor"] = 1e-8 * line["step"] ** 2
    fake_run.write_lines(folder, lines)
    (folder / "config.yaml").write_text(
        "learning_rate: 0.1\nkl_weight: 0.0\nseed: 3\nmax_steps: 200\n"
    )
    return folder


def test_a_run_is_kept_clip_by_clip(beyond, tmp_path):
    x = overoptimisation.distances(read_run(beyond))
    assert x[0] == 0 and (np.diff(x) > 0).all() and x[2] == pytest.approx(1e-4 * 95, rel=0.05)
    overoptimisation.main(
        [
            "--distil",
            str(beyond),
            "--records",
            str(tmp_path / "kept.jsonl"),
            "--output",
            str(tmp_path / "figure.png"),
        ]
    )
    (kept,) = read_lines(tmp_path / "kept.jsonl")
    assert kept["name"] == "beyond"
    assert kept["flags"] == {"learning_rate": 0.1, "kl_weight": 0.0, "seed": 3, "max_steps": 200}
    assert kept["step"] == [0, 50, 100, 150, 200] and kept["root_kl"] == pytest.approx(x, abs=1e-4)
    listing = json.loads((beyond / "validation" / "step-000100" / "clips.json").read_text())
    assert kept["match"][2] == pytest.approx([clip["gold"]["match"] for clip in listing], abs=1e-4)
    assert kept["reward"][2] == pytest.approx(
        [clip["scores"]["total"] for clip in listing], abs=1e-4
    )
    assert (tmp_path / "figure.png").stat().st_size > 5000


def test_lines_stand_where_the_held_out_reward_was_highest_and_where_a_kl_keeps_a_run():
    figure = overoptimisation.draw(list(RECORDS.values()))
    ax = figure.axes[0]
    places = [line.get_xdata()[0] for line in ax.get_lines() if line.get_linestyle() == "--"]
    free, kept = RECORDS["free-2e-4"], RECORDS["kept-4e-4"]
    assert places == [free["root_kl"][free["step"].index(120)], kept["root_kl"][-1]]
    assert (
        len([line for line in ax.get_lines() if line.get_linestyle() == "-"]) == len(RECORDS) == 4
    )
    assert overoptimisation.smooth([5.0, 1.0, 2.0, 6.0]).tolist() == [5.0, 1.5, 3.0, 4.0]


@pytest.mark.parametrize(
    ("name", "later", "at_the_end", "of_a_kl"),
    [
        ("reward", (0.17, 0.13), (0.22, 0.11), (0.06, 0.14)),
        ("match", (-0.15, 0.11), (-0.06, 0.11), (0.11, 0.13)),
        ("distance", (0.010, 0.003), (0.015, 0.003), (-0.022, 0.003)),
        ("holdout", (-0.38, 0.10), (-0.59, 0.10), (1.00, 0.10)),
    ],
)
def test_the_numbers_of_the_text(name, later, at_the_end, of_a_kl):
    """Those of research/studies/overoptimisation.md."""
    free, kept = RECORDS["free-2e-4"], RECORDS["kept-4e-4"]
    close = {"abs": 5e-4 if name == "distance" else 5.1e-3}
    assert overoptimisation.changed(free, name, EARLY, LATE) == pytest.approx(later, **close)
    assert overoptimisation.changed(free, name, EARLY, LAST) == pytest.approx(at_the_end, **close)
    both = {"step": [0, 1], name: [free[name][-1], kept[name][-1]]}
    assert overoptimisation.changed(both, name, [0], [1]) == pytest.approx(of_a_kl, **close)


@pytest.mark.parametrize(
    ("name", "first"),
    [("free-2e-4", 360), ("free-4e-4", 160), ("free-4e-4-again", 160), ("kept-4e-4", None)],
)
def test_the_watch_finds_what_happened(tmp_path, name, first):
    record = RECORDS[name]
    for step, rewards, holdouts in zip(
        record["step"], record["reward"], record["holdout"], strict=True
    ):
        folder = tmp_path / "validation" / f"step-{step:06d}"
        folder.mkdir(parents=True)
        clips = [{"file": "a.mp4", "prompt": "a", "seed": seed} for seed in range(len(rewards))]
        for clip, reward, holdout in zip(clips, rewards, holdouts, strict=True):
            clip |= {"scores": {"total": reward}, "holdout": {"x": holdout}}
        (folder / "clips.json").write_text(json.dumps(clips))
    assert next((step for step in record["step"] if divergence(tmp_path, step)), None) == first


def test_a_run_without_a_curve_is_refused(tmp_path):
    folder = make_run(tmp_path / "short", iterations=2, every=2, prompts=2)
    with pytest.raises(SystemExit, match=r"has 2 validation\(s\); at least 3 make a curve"):
        overoptimisation.main(["--distil", str(folder), "--records", str(tmp_path / "kept.jsonl")])
    with pytest.raises(SystemExit, match="has no records: --distil makes them"):
        overoptimisation.main(["--records", str(tmp_path / "kept.jsonl")])
