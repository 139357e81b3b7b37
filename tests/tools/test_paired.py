import json
import math
import re
from pathlib import Path

import pytest

from sage_grpo.runs.clips import Clip
from sage_grpo.runs.history import read_run
from sage_grpo.tools.paired import Measure, aligned, choose_pairs, compare, table
from tests.tools.fake_run import validation_line, write_lines


def clip(seed: int, prompt: str = "a", path: Path = Path("none.mp4"), **values: float) -> Clip:
    return Clip(path, prompt, seed, {f"reward/{name}": value for name, value in values.items()})


def entry(seed: int, total: float | None, distance: float) -> dict:
    gold = {"distance": distance}
    return {"file": f"{seed}.mp4", "prompt": "a", "seed": seed, "number": 0, "scores": {"total": total}, "gold": gold}


@pytest.mark.parametrize(
    ("difference", "half", "better", "verdict"),
    [
        (0.2, 0.1, 1, 1),
        (-0.2, 0.1, 1, -1),
        (-0.2, 0.1, -1, 1),
        (0.2, 0.1, -1, -1),
        (0.1, 0.2, 1, 0),
        (1, math.nan, 1, 0),
    ],
)
def test_verdict(difference, half, better, verdict):
    assert Measure(0, 0, 0, 0, difference, half, better).verdict == verdict


def two_validations(folder: Path, before: list[dict], after: list[dict]) -> Path:
    for step, entries in ((0, before), (7, after)):
        home = folder / "validation" / f"step-{step:06d}"
        home.mkdir(parents=True)
        (home / "clips.json").write_text(json.dumps(entries))
    finite = [[entry for entry in entries if entry["scores"]["total"] is not None] for entries in (before, after)]
    write_lines(folder, [validation_line(0, finite[0]), validation_line(7, finite[1])])
    return folder


def test_comparison_of_a_folder(tmp_path):
    before = [entry(seed, 1.0, 0.05) for seed in range(4)]
    after = [entry(seed, 1.5 + 0.1 * seed, 0.04 + 0.001 * seed) for seed in range(4)]
    comparison = compare(read_run(two_validations(tmp_path, before, after)))
    assert comparison.steps == (0, 7) and len(comparison.pairs) == 4
    assert list(comparison.measures) == ["reward/total", "gold/distance"]
    total, distance = comparison.measures.values()
    assert (total.before, total.after, total.difference) == pytest.approx((1.0, 1.65, 0.65))
    assert total.after_error == pytest.approx(math.sqrt(0.05 / 3) / 2)
    assert distance.difference == pytest.approx(-0.0085) and (total.verdict, distance.verdict) == (1, 1)


def test_the_interval_is_of_differences_and_pairs_with_a_failed_reward_do_not_count(tmp_path):
    before = [entry(seed, 0.5, 0.1) for seed in (1, 2, 3, 4)] + [entry(5, None, 0.1), entry(6, 0.5, 0.1)]
    after = [entry(seed, 0.5 + seed, 0.1) for seed in (1, 2, 3, 4)] + [entry(5, 100.0, 0.1), entry(6, None, 0.1)]
    total = compare(read_run(two_validations(tmp_path, before, after))).measures["reward/total"]
    assert total.difference == 2.5
    assert total.half == pytest.approx(3.182 * math.sqrt(5 / 3) / 2, rel=0.01)  # t of 3 degrees of freedom


def test_one_validation_is_no_comparison(tmp_path):
    write_lines(tmp_path, [validation_line(0, [entry(1, 1.0, 0.1)] * 3)])
    assert compare(read_run(tmp_path)) is None


def test_table_of_the_terminal(tmp_path):
    before = [entry(seed, 1.0, 0.05) for seed in range(4)]
    after = [entry(seed, 1.5 + 0.1 * seed, 0.05 + 0.001 * (seed % 2)) for seed in range(4)]
    run = read_run(two_validations(tmp_path, before, after))
    titles, total, distance = aligned(table(run, compare(run))).splitlines()
    assert titles.split("  ")[0] == "held-out prompts" and "iteration 7" in titles
    assert re.split("  +", total) == [
        "reward total",
        "1.000 ± 0.000",
        "1.650 ± 0.065",
        "+0.650",
        "+0.445 to +0.855",
        "better",
        "–",
    ]
    assert distance.startswith("gold distance (lower is better)") and "not significant" in distance
    write_lines(tmp_path, [validation_line(0, before)])
    run = read_run(tmp_path)
    assert aligned(table(run, compare(run))) == ""


def test_chosen_clips_spread_over_gains_and_losses(tmp_path):
    path = tmp_path / "clip.mp4"
    path.write_bytes(bytes(10))
    pairs = [(clip(i, str(i), path, total=0.0), clip(i, str(i), path, total=float(i))) for i in range(9)]
    again = (clip(50, "8", path, total=0.0), clip(50, "8", path, total=50.0))
    lost = (clip(60, "60", total=0.0), clip(60, "60", total=60.0))

    def gains(most: int) -> list[float]:
        return [after.reward for _, after in choose_pairs([*pairs, again, lost], most)]

    assert gains(6) == [8, 7, 5, 4, 1, 0]  # one clip per prompt, none without its file
    assert gains(12) == [8, 7, 6, 5, 4, 3, 2, 1, 0]
