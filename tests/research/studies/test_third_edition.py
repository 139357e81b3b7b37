"""The third edition: what is registered is what would run, and its verdicts follow from made-up results."""

import math
from functools import partial

import pytest

from research.studies import records, third_edition
from research.studies.compute import units
from research.studies.questions import StudyPlan, StudyRun
from research.studies.second_edition import RATES, RAW, RECIPE, REPORTED, SEARCH, config_of
from research.studies.third_edition import (
    PAGE,
    REFERENCE,
    STAGES,
    arms,
    goal_table,
    log_ratios,
    main,
    page,
    rates_file,
    studies,
    two_best,
    units_to_match,
    verdict,
)
from sage_grpo.exit_codes import DONE, PREEMPTED, WRONG_INPUT
from sage_grpo.intervals import Interval
from tests.research.studies.invented_results import invented

CHEAPER = "nft, best and worst of 8"


def test_the_committed_page_is_what_would_run():
    assert PAGE.read_text(encoding="utf-8") == page(), (
        "write it again, before any run: research.studies.third_edition --page"
    )


def test_arms_cost_the_same_and_the_search_uses_no_seed_that_is_reported():
    spent = []
    for flags in arms().values():
        config = config_of(REPORTED, RAW, flags)
        spent.append(units(config) * config.batch_size * config.max_steps)
    assert len(spent) == 12
    assert max(spent) / min(spent) < 1.02
    keys = StudyPlan((), None, RECIPE, studies()).keys
    seeds = {name: {seed for study, _, seed in keys if study == name} for name, _, _ in keys}
    assert seeds == {"rates": {SEARCH["first_seed"]}, "clips": set(range(1, 9))}


def run(arm, seed, study="clips"):
    return StudyRun(study, arm, seed, config_of(REPORTED, RAW, arms()[arm], {"seed": seed}))


def result(arm, seed, last_match, collapsed=""):
    """A run whose match rises linearly from 0.3."""
    record = invented(run(arm, seed), collapsed=collapsed)
    validation = record["validation"]
    last = validation["step"][-1]
    validation["gold/match"] = [
        0.3 + (last_match - 0.3) * step / last for step in validation["step"]
    ]
    return record


def test_units_are_counted_to_the_match_and_those_who_never_have_it_count_with_all():
    base = {1: result(REFERENCE, 1, 0.9), 2: result(REFERENCE, 2, 0.8)}
    cheap = {1: result(CHEAPER, 1, 1.5), 2: result(CHEAPER, 2, 1.5)}
    assert math.isnan(units_to_match(base[2]))
    (log,) = log_ratios(cheap, base)  # the second pair leaves
    assert log == pytest.approx(math.log(0.5), abs=0.02)
    (slow,) = log_ratios({1: result(CHEAPER, 1, 0.6)}, base)
    assert slow == pytest.approx(0, abs=0.02)


VERDICTS = {  # ratio of units, its half interval in logarithms, differences in match and spread with theirs
    "**wins**": (0.5, 0.1, (0.0, 0.04), (0.01, 0.02)),
    "goal met on average": (0.55, 0.2, (0.0, 0.04), (0.01, 0.02)),
    "goal not met": (0.7, 0.1, (0.0, 0.04), (0.01, 0.02)),
    "goal met; match may be worse": (0.5, 0.1, (-0.02, 0.04), (0.01, 0.02)),
    "goal met; match may be worse; spread may be worse": (0.5, 0.1, (-0.1, 0.1), (0.0, math.nan)),
}


@pytest.mark.parametrize("expected", VERDICTS)
def test_verdicts_are_those_registered(expected):
    ratio, half, match, spread = VERDICTS[expected]
    assert verdict(Interval(math.log(ratio), half), Interval(*match), Interval(*spread)) == expected


def test_the_table_names_a_winner():
    spread = {"end": {third_edition.SPREAD: 0.5}}
    gains = {
        REFERENCE: (0.9, 0.92, 0.94),
        CHEAPER: (1.6, 1.62, 1.6),
        "awm, 4 of 8": (0.5, 0.5, 0.5),
    }
    made = {
        arm: {
            seed: result(arm, seed, match) | {"spread": spread} for seed, match in enumerate(own, 1)
        }
        for arm, own in gains.items()
    }
    rows = {row.split(" | ")[0].strip("| "): row for row in goal_table(made, {}).splitlines()}
    assert "**wins**" in rows[CHEAPER]
    assert "goal not met; match may be worse" in rows["awm, 4 of 8"]
    assert goal_table({}, {}) == "No results yet.\n"


def test_guidance_waits_for_the_two_best_that_never_collapsed(tmp_path):
    results = tmp_path / "third.jsonl"
    for number, arm in enumerate(arms()):
        for seed in range(1, 9):
            collapsed = "lost" if number == 11 and seed == 3 else ""
            if (number, seed) == (11, 8):
                assert two_best(results) == []
            records.append(results, result(arm, seed, 0.4 + number / 100, collapsed))
    names = list(arms())
    assert two_best(results) == [names[10], names[9]]
    guided = studies(results)["guidance_rates"].arms
    assert len(guided) == 3 * len(RATES)
    assert {flags["guidance_scale"] for flags in guided.values()} == {2.0}


def test_stages_follow_each_other_and_stop_where_runs_are_left(tmp_path, monkeypatch):
    results = tmp_path / "third.jsonl"
    started = []

    def pretended(words, registered, codes):
        stage = words[words.index("--studies") + 1]
        started.append(stage)
        return codes.get(stage, DONE)

    def start(codes):
        monkeypatch.setattr(third_edition.ablate, "main", partial(pretended, codes=codes))
        return main(["--results", str(results), "--budget_minutes", "9"])

    assert start({"rates": PREEMPTED}) == PREEMPTED
    assert started == ["rates"]
    assert rates_file(results).is_file()
    started.clear()
    assert start({}) == DONE
    assert started == ["rates", "clips"]  # nothing is at an end, and no result names the best
    assert set(started) < set(STAGES)


def test_a_rehearsal_is_never_a_result(capsys):
    assert main(["--tiny"]) == WRONG_INPUT
    assert "--results" in capsys.readouterr().err
    assert main(["--studies", "clips"]) == WRONG_INPUT


def test_all_stages_lead_to_the_page_of_results(tmp_path, monkeypatch):
    """Runs are pretended: nft with half of its clips or fewer is best, and at the highest rate."""
    results = tmp_path / "third.jsonl"
    started = []

    def pretended(words, registered):
        stage = words[words.index("--studies") + 1]
        started.append(stage)
        for made in StudyPlan([stage], None, RECIPE, registered).runs.values():
            is_best = made.arm.startswith(("nft, best", "nft, 4"))
            gain = 0.3 + is_best * 0.1 + made.config.learning_rate
            record = invented(made, gain, match=0.95 if is_best else 0.5 + made.seed / 100)
            records.append(results, record)
        return DONE

    monkeypatch.setattr(third_edition.ablate, "main", pretended)
    monkeypatch.setattr(third_edition.results_page, "draw", lambda path, drawing: None)
    assert main(["--results", str(results)]) == DONE
    assert started == list(STAGES)
    assert {flags["learning_rate"] for flags in studies(results)["clips"].arms.values()} == {3e-3}
    guided = studies(results)["guidance"].arms
    assert len(guided) == 3
    assert all(arm.startswith("nft, ") for arm in guided)

    started.clear()
    page_of_results = tmp_path / "results_3.md"
    assert third_edition.summary(results, page_of_results) == DONE
    text = page_of_results.read_text()
    assert text.count("| verdict |") == 2
    assert "nft, best and worst of 8" in text
