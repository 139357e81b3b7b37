"""Results against compute, from made-up results with known numbers."""

import math

import numpy as np
import pytest
from matplotlib.figure import Figure

from research.studies import compute, records
from research.studies.compute import (
    ALL_STEPS,
    cost_table,
    level_of,
    matches_at_equal_reward,
    units_to,
    validations,
)
from research.studies.questions import StudyPlan, StudyRun
from research.studies.second_edition import RECIPE, config_of, studies, summary, units
from tests.research.studies.invented_results import START, invented

FLASH = "flash, 2 steps per prompt"


def run(arm, seed, study="head_to_head"):
    flags = studies()[study].arms[arm]
    return StudyRun(study, arm, seed, config_of(flags, {"seed": seed}))


def results(gains):
    """arm -> seed -> a run whose reward rises linearly from 0.6 by so much; the level is 0.8."""
    return {
        arm: {seed: invented(run(arm, seed), gain) for seed, gain in enumerate(own, 1)}
        for arm, own in gains.items()
    }


@pytest.fixture
def search(monkeypatch):
    monkeypatch.setattr(compute, "level_of", lambda found: 0.8)
    return {}


def test_units_are_spent_step_by_step():
    record = invented(run(FLASH, 1))
    spent, rewards = validations(record, "reward/total")
    config = run(FLASH, 1).config
    assert spent[0] == 0 and spent[-1] == pytest.approx(
        units(config) * config.batch_size * config.max_steps
    )
    assert rewards[-1] == pytest.approx(0.9) and len(spent) == 3


def test_units_to_a_reward_lie_between_validations():
    record = invented(run(FLASH, 1), gain=0.4)
    whole = validations(record, "reward/total")[0][-1]
    assert units_to(record, 0.9) == pytest.approx(0.75 * whole, rel=0.01)
    assert math.isnan(units_to(record, 1.1))


def test_the_level_is_that_of_the_search_at_its_best_rate():
    found = {}
    for number, (arm, gain, lost) in enumerate(
        [
            (f"{ALL_STEPS}, 0.001", 0.5, "lost"),
            (f"{ALL_STEPS}, 0.0001", 0.1, ""),
            (f"{ALL_STEPS}, 0.0003", 0.3, ""),
        ]
    ):
        found[str(number)] = invented(run(arm, 101, "rates"), gain, collapsed=lost)
    found["other"] = invented(run("flow, 0.001", 101, "rates"), 0.9)
    found["compared"] = invented(run(ALL_STEPS, 1), 0.8)
    assert level_of(found) == pytest.approx(0.6 + 0.75 * 0.3)
    assert math.isnan(level_of({}))


def test_an_arm_that_takes_half_the_units_is_cheaper(search):
    table = cost_table(
        results({ALL_STEPS: [0.2, 0.21, 0.22, 0.2], FLASH: [0.4, 0.42, 0.45, 0.41]}), search
    )
    row = next(line for line in table.splitlines() if line.startswith(f"| {FLASH} "))
    assert "| 4 | 4 |" in row and "**cheaper**" in row
    ratio = float(row.split("|")[5].split()[0])
    assert ratio == pytest.approx(
        0.5, abs=0.02
    )  # both have the same budget, and one gains twice as fast


def test_the_match_at_the_reward_is_compared_by_pairs(search):
    half = {
        ALL_STEPS: [0.6, 0.62, 0.61, 0.6],
        FLASH: [0.5, 0.53, 0.5, 0.53],
        "flow": [0.5, 0.7, 0.6, 0.62],
    }
    runs = {
        arm: {i: invented(run(arm, i), 0.4, match=m) for i, m in enumerate(own, 1)}
        for arm, own in half.items()
    }
    rows = {
        line.split(" |")[0]: line.split("|")[6].strip()
        for line in cost_table(runs, search).splitlines()[3:]
    }
    start = START["gold/match"]
    assert (
        rows[f"| {ALL_STEPS}"] == f"{(start + 0.6075) / 2:.2f}"
    )  # halfway to the reward of the end
    assert rows[f"| {FLASH}"] == f"{(start + 0.515) / 2:.2f} (−0.046 ± 0.014: **worse**)"
    assert rows["| flow"].endswith(": undecided)")
    short = invented(run(FLASH, 4), 0.1, match=0.5)  # never has the reward: its pair is left out
    told = compute.matches_there(runs | {FLASH: runs[FLASH] | {4: short}}, 0.8)[FLASH]
    assert told.endswith(" (−0.050 ± 0.012: **worse**)")
    assert compute.matches_there({ALL_STEPS: runs[ALL_STEPS]}, 5.0) == {ALL_STEPS: "–"}


def test_runs_that_never_get_there_count_with_their_budget(search):
    table = cost_table(
        results({ALL_STEPS: [0.4, 0.4, 0.4], FLASH: [0.1, 0.1, 0.1], "flow": [0.1, 0.5, 0.4]}),
        search,
    )
    row = next(line for line in table.splitlines() if line.startswith(f"| {FLASH} "))
    assert "| 3 | 0 | over " in row and "**costlier**" in row
    other = next(line for line in table.splitlines() if line.startswith("| flow "))
    assert "| 3 | 2 | over " in other and "undecided" in other


def test_a_run_that_was_stopped_counts_as_if_it_had_gone_on(search):
    arms = results({ALL_STEPS: [0.4] * 3, FLASH: [0.1] * 3})
    whole = cost_table(arms, search)
    stopped = {seed: invented(run(FLASH, seed), 0.1, collapsed="lost") for seed in (1, 2, 3)}
    assert cost_table(arms | {FLASH: stopped}, search) == whole


def test_arms_that_are_not_run_yet_count_as_tests(search):
    arms = results({ALL_STEPS: [0.3] * 4, FLASH: [0.36, 0.45, 0.40, 0.42]})
    more = arms | {f"arm {number}": {} for number in range(30)}
    rows = [
        next(x for x in cost_table(a, search).splitlines() if x.startswith(f"| {FLASH} "))
        for a in (arms, more)
    ]
    assert "**cheaper**" in rows[0] and "undecided" in rows[1]


def test_a_seed_without_a_reference_leaves_the_pairs(search):
    few = cost_table(results({ALL_STEPS: [0.1, 0.4, 0.4], FLASH: [0.4, 0.4, 0.4]}), search)
    ratio = next(line for line in few.splitlines() if line.startswith(f"| {FLASH} ")).split("|")[5]
    assert (
        ratio.endswith(": undecided ") and "(" not in ratio
    )  # two pairs are too few for an interval


def matched(matches):
    """arm -> seed -> a run that ends with this match."""
    return {
        arm: {i: invented(run(arm, i), 0.3, match=m) for i, m in enumerate(own, 1)}
        for arm, own in matches.items()
    }


FOUR = {
    "published": [0.40, 0.41, 0.42, 0.40], "flow": [0.60, 0.62, 0.61, 0.63], "cps": [0.61, 0.60, 0.62, 0.61],
    "awm": [0.90, 0.91, 0.93, 0.90],
}  # fmt: skip


@pytest.mark.slow
def test_the_winner_is_beaten_by_none_of_those_that_beat_the_first():
    """Slow: compares all arms with bootstrapped intervals."""
    assert compute.winners(matched(FOUR)) == ["awm"]
    tied = compute.winners(matched({arm: FOUR[arm] for arm in ("published", "flow", "cps")}))
    assert sorted(tied) == ["cps", "flow"] and tied[0] == "flow"  # the higher mean first
    assert (
        compute.winners(matched({"published": FOUR["flow"], "flow": FOUR["cps"]})) == []
    )  # undecided
    two = matched({arm: FOUR[arm] for arm in ("published", "flow")})
    assert compute.winners(two) == ["flow"]
    assert (
        compute.winners(two | {f"arm {i}": {} for i in range(1000)}) == []
    )  # arms that are not run yet count as tests


@pytest.mark.slow
def test_the_decision_is_ordered_by_match_and_says_how_far_behind_the_winner(search):
    """Slow: compares all arms with bootstrapped intervals."""
    rows = compute.decision_table(matched(FOUR), search).splitlines()
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows[2:6]]
    assert [row[0] for row in cells] == ["awm", "flow", "cps", "published"]
    assert (
        cells[0][1:3] == ["0.91 ± 0.02", "0.10 ± 0.00"] and cells[0][-1] == "**winner**"
    )  # in training all have 0.1
    assert cells[1][-1] == "behind awm: −0.30 ± 0.03" and cells[3][4] == "1"
    tied = compute.decision_table(
        matched({arm: FOUR[arm] for arm in ("published", "flow", "cps")}), search
    )
    assert tied.count("**joint winner**") == 2 and tied.count("behind flow") == 1
    assert compute.decision_table({"published": {}, "awm": {}}, search) == "No results yet.\n"


def test_samplers_are_compared_with_sage_alone():
    arms = matched({ALL_STEPS: FOUR["flow"], "flow": FOUR["awm"], "cps": FOUR["cps"]})
    rows = [line for line in compute.sampler_table(arms).splitlines() if line.startswith("| ")][1:]
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]
    assert cells[0][0] == "flow" and cells[0][2:] == [
        "+0.000 ± 0.000: undecided",
        "+0.295 ± 0.033: **better**",
    ]
    assert cells[1][0] == "cps" and cells[1][3].endswith("undecided")
    assert compute.sampler_table(arms | {"dance": {}}) == "No results yet.\n"


def test_a_search_shows_every_rate_and_marks_the_best_that_did_not_collapse():
    gains = {
        f"{ALL_STEPS}, 0.0001": (0.1, ""),
        f"{ALL_STEPS}, 0.0003": (0.3, ""),
        f"{ALL_STEPS}, 0.001": (0.5, "lost"),
    }
    found = {
        arm: invented(run(arm, 101, "rates"), gain, collapsed=lost)
        for arm, (gain, lost) in gains.items()
    }
    found["other"] = invented(run("flow", 1), 0.9)
    head, _, row, *_ = compute.search_table(found, ("rates",)).splitlines()
    assert head == "| arm | 0.0001 | 0.0003 | 0.001 |"
    assert [cell.strip()[:6] for cell in row.split("|")[2:5]] == ["0.700,", "**0.90", "collap"]
    sizes = [f"{count} prompt{'s' * (count > 1)} per update, 0.0003" for count in (16, 1, 2)]
    found = {arm: invented(run(arm, 101, "batch_rates"), 0.1) for arm in sizes}
    rows = compute.search_table(found, ("batch_rates",)).splitlines()[2:5]
    assert [row.split()[1] for row in rows] == ["1", "2", "16"]


def test_matches_are_compared_at_the_reward_that_all_reach():
    names = ["1 prompt per update", "16 prompts per update"]
    arms = {names[0]: {1: invented(run(names[0], 1, "batches"), gain=0.2, match=0.8)}}
    arms[names[1]] = {1: invented(run(names[1], 1, "batches"), gain=0.4, match=1.0)}
    found = matches_at_equal_reward(arms)
    assert found[names[0]] == pytest.approx([0.8]) and found[names[1]] == pytest.approx([0.8])


def test_labels_are_moved_apart_and_stay_below_the_top():
    assert compute.apart([0.1, 0.5, 0.5], 0.1, 1.0) == pytest.approx([0.1, 0.5, 0.6])
    assert compute.apart([0.2, 0.95, 0.96, 0.97], 0.1, 1.0) == pytest.approx([0.2, 0.8, 0.9, 1.0])
    assert compute.apart([], 0.1, 1.0) == []


def test_figures_show_every_arm():
    axes = Figure().subplots(1, 3, squeeze=False)
    arms = results({ALL_STEPS: [0.2, 0.3, 0.4], FLASH: [0.4, 0.5, 0.6]})
    compute.draw_compute(axes, arms, "method")
    line = next(line for line in axes.flat[1].lines if line.get_label() == ALL_STEPS)
    spent, rewards = line.get_data()
    assert line.get_color() == compute.COLORS[ALL_STEPS] and FLASH not in compute.COLORS
    assert [text.get_text() for text in axes.flat[0].texts] == [
        ALL_STEPS
    ]  # the others are grey and without a name
    whole = validations(arms[ALL_STEPS][1], "reward/total")[0]
    np.testing.assert_allclose(spent, whole / 1000)
    np.testing.assert_allclose(rewards, [0.6, 0.75, 0.9])
    assert all(len(ax.lines) >= 2 for ax in axes.flat)
    axes = Figure().subplots(1, 3, squeeze=False)
    names = ["1 prompt per update", "16 prompts per update"]
    compute.draw_batches(axes, {name: {1: invented(run(name, 1, "batches"))} for name in names}, "")
    np.testing.assert_allclose(
        np.array(axes.flat[0].lines[0].get_data(), float), [[1, 16], [0.9, 0.9]]
    )


def test_the_summary_has_the_table_and_the_figure(tmp_path):
    plan, found = StudyPlan(recipe=RECIPE, studies=studies()), {}
    for arm in (ALL_STEPS, FLASH):
        for seed in (1, 2, 3):
            one = plan.runs[plan.keys["head_to_head", arm, seed]]
            found[one.name] = invented(one, 0.3 + 0.01 * seed)
    rate = plan.runs[plan.keys["rates", f"{ALL_STEPS}, 0.0003", 101]]
    found[rate.name] = invented(rate, 0.2)
    for record in found.values():
        records.append(tmp_path / "results.jsonl", record)
    assert summary(tmp_path / "results.jsonl", tmp_path / "page.md") == 0
    text = (tmp_path / "page.md").read_text()
    assert "Units until held-out prompts have a reward of 0.750: 75% of what" in text
    assert (tmp_path / "figures" / "page_head_to_head.png").stat().st_size > 20_000
