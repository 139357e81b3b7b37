"""The third edition: what is registered is what would run, and its verdicts follow from made-up results."""

import math
from functools import partial

import pytest

from research.studies import records, third_edition
from research.studies.compute import units
from research.studies.questions import Study, StudyPlan, StudyRun
from research.studies.second_edition import RATES, RAW, RECIPE, REPORTED, SEARCH, config_of
from research.studies.third_edition import (
    COMPARED_SAMPLERS,
    GUIDED_SAMPLER,
    PAGE,
    REFERENCE,
    STAGES,
    TODAYS_POINT,
    TODAYS_SAMPLER,
    arms,
    beside_the_search,
    centered_pairs,
    compared_arms,
    main,
    page,
    points,
    rates_file,
    sampled,
    studies,
    two_best,
)
from research.studies.third_tables import (
    PLACES,
    SPREAD,
    averaged_table,
    centering_table,
    check_table,
    goal_table,
    log_ratios,
    sampler_table,
    taken_samplers,
    units_to_match,
    variety_decision,
    verdict,
)
from sage_grpo.exit_codes import DONE, FAILED, PREEMPTED, WRONG_INPUT
from sage_grpo.intervals import Interval
from tests.research.studies.invented_results import invented

CHEAPER = "nft, best and worst of 8"


def test_the_committed_page_is_what_would_run():
    assert PAGE.read_text(encoding="utf-8") == page(), (
        "write it again, before any run: research.studies.third_edition --page"
    )


def test_arms_cost_the_same_and_the_search_uses_no_seed_that_is_reported(tmp_path):
    shorter = {"half of the updates": 0.5, "a quarter of the updates": 0.25}
    spent = []
    for study_arms in (arms(), sampled(), points()):
        for arm, flags in study_arms.items():
            config = config_of(REPORTED, RAW, flags)
            cost = units(config) * config.batch_size * config.max_steps
            spent.append(cost / shorter.get(arm, 1.0))
    assert len(spent) == 15 + 10 + 11
    assert max(spent) / min(spent) < 1.04  # a quarter of 91 updates is 22
    plan = StudyPlan((), None, RECIPE, studies(tmp_path / "third.jsonl"))
    seeds = {
        name: {seed for study, _, seed in plan.keys if study == name} for name, _, _ in plan.keys
    }
    few = set(range(1, 5))
    assert seeds == {
        "rates": {SEARCH["first_seed"]},
        "clips": set(range(1, 9)),
        "averaged": set(range(1, 9)),
        "centering": few,
        "samplers": few,
        "variety": few,
    }


def test_studies_share_their_references_and_are_validated_alike():
    """At any rates: what is not averaged, today's sampler and point, and two other points are runs of `clips`."""
    plan = StudyPlan((), None, RECIPE, studies())
    shared = {
        (study, arm)
        for (study, arm, _), key in plan.keys.items()
        if study in ("averaged", "samplers", "variety") and plan.runs[key].study == "clips"
    }
    assert shared == {
        ("averaged", REFERENCE),
        ("averaged", CHEAPER),
        ("samplers", TODAYS_SAMPLER),
        ("variety", TODAYS_POINT),
        ("variety", "best and worst of 8"),
        ("variety", "best and worst of 16"),
    }
    names = ("validation_num_inference_steps", "validation_solver", "validation_timestep_shift")
    validated_by = {
        tuple(getattr(run.config, name) for name in names) for run in plan.runs.values()
    }
    assert len(validated_by) == 1


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


def test_runs_that_never_have_the_match_make_the_ratio_a_lower_bound():
    """Seed 3 does not count, since there the reference never reaches the match."""
    base = {
        1: result(REFERENCE, 1, 0.9),
        2: result(REFERENCE, 2, 0.9),
        3: result(REFERENCE, 3, 0.8),
    }
    ends = {1: 2.1, 2: 2.1, 3: 0.8}
    reaching = {seed: result(CHEAPER, seed, end) for seed, end in ends.items()}
    told = goal_table({REFERENCE: base, CHEAPER: reaching}, {}, REFERENCE)
    assert "| 2 | 0.33" in told and "over 0" not in told
    missing = reaching | {2: result(CHEAPER, 2, 0.8)}
    told = goal_table({REFERENCE: base, CHEAPER: missing}, {}, REFERENCE)
    assert "| 1 | over 0.5" in told and "goal met on average, 1 that never" in told
    no_gap = Interval(0.0, 0.01)
    assert verdict(Interval(-1.0, 0.1), no_gap, no_gap, missing=1).startswith(
        "**wins**, 1 that never"
    )


def test_the_table_names_a_winner():
    spread = {"end": {SPREAD: 0.5}}
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
    table = goal_table(made, {}, REFERENCE)
    rows = {row.split(" | ")[0].strip("| "): row for row in table.splitlines()}
    assert "**wins**" in rows[CHEAPER]
    assert "goal not met; match may be worse" in rows["awm, 4 of 8"]
    assert goal_table({}, {}, REFERENCE) == "No results yet.\n"


SPREADS = {"base": {SPREAD: 0.53, PLACES: 0.13}}


def made_up(study_arms, ends, seeds):
    """By arm and seed, runs that end with the match and spread of `ends`, or of None."""
    made = {}
    for arm, flags in study_arms.items():
        match, spread, collapsed = (*ends.get(arm, ends[None]), "")[:3]
        made[arm] = {}
        for seed in seeds:
            run = StudyRun("any", arm, seed, config_of(REPORTED, RAW, flags, {"seed": seed}))
            record = invented(run, match=match + seed / 1000, collapsed=collapsed)
            end = {SPREAD: spread - seed / 1000, PLACES: spread / 4}
            made[arm][seed] = record | {"spread": SPREADS | {"end": end}}
    return made


# match, spread and, where runs collapsed, why; None: all other arms
SAMPLED = {
    "a cheaper one that is as good": (
        {
            None: (0.95, 0.45),
            "dpm, 4 steps": (0.96, 0.45),
            "unipc, 3 steps": (0.85, 0.5),
            "euler, 3 steps": (0.95, 0.5, "lost"),
        },
        {TODAYS_SAMPLER: "dpm, 4 steps", GUIDED_SAMPLER: "dpm, 5 steps, guided above 0.8"},
    ),
    "the cheapest, if it is as good; not one that narrows": (
        {
            None: (0.95, 0.45),
            "euler, 3 steps": (0.97, 0.45),
            "dpm, 5 steps, guided above 0.8": (0.97, 0.39),
        },
        {TODAYS_SAMPLER: "euler, 3 steps", GUIDED_SAMPLER: GUIDED_SAMPLER},
    ),
    "an equally cheap one only if it is better": (
        {None: (0.8, 0.45), TODAYS_SAMPLER: (0.95, 0.45), "unipc, 5 steps": (0.99, 0.45)},
        {TODAYS_SAMPLER: "unipc, 5 steps", GUIDED_SAMPLER: GUIDED_SAMPLER},
    ),
    "today's, if no other is": (
        {None: (0.8, 0.45), TODAYS_SAMPLER: (0.95, 0.45), GUIDED_SAMPLER: (0.95, 0.45)},
        {TODAYS_SAMPLER: TODAYS_SAMPLER, GUIDED_SAMPLER: GUIDED_SAMPLER},
    ),
}


@pytest.mark.parametrize("case", SAMPLED)
def test_the_cheapest_sampler_that_is_no_worse_is_taken(case):
    ends, expected = SAMPLED[case]
    made = made_up(sampled(), ends, range(1, 5))
    assert taken_samplers(made, COMPARED_SAMPLERS, 4) == expected
    table = sampler_table(made, {}, COMPARED_SAMPLERS, 4)
    assert table.count("**taken**") == sum(arm != other for arm, other in expected.items())
    made["dpm, 10 steps"].pop(4)
    assert taken_samplers(made, COMPARED_SAMPLERS, 4) == {}
    assert sampler_table({}, {}, COMPARED_SAMPLERS, 4) == "No results yet.\n"


WIDER = "KL weight 3"
HELD = {None: (0.95, 0.44), WIDER: (0.93, 0.52), "KL weight 10": (0.7, 0.53)}
CHECKED = {  # ends with the first seeds, ends with the new ones, what the sentence says
    "confirmed": (HELD, HELD, f"take **{WIDER}**"),
    "the spread of all seeds is higher": (HELD, HELD | {WIDER: (0.93, 0.44)}, f"take **{WIDER}**"),
    "the match of new seeds is lower": (HELD, HELD | {WIDER: (0.89, 0.52)}, f"confirm {WIDER}"),
    "the spread of new seeds is lower": (HELD, HELD | {WIDER: (0.95, 0.4)}, f"confirm {WIDER}"),
    "a new seed collapsed": (HELD, HELD | {WIDER: (0.95, 0.52, "lost")}, f"confirm {WIDER}"),
    "not run yet": (HELD, {}, f"Proposed is {WIDER}"),
    "none is wider": ({None: (0.95, 0.44)}, {}, "no other may be proposed"),
    "wider at too high a price": (HELD | {WIDER: (0.89, 0.5)}, {}, "no other may be proposed"),
    "wider but collapsed": (HELD | {WIDER: (0.95, 0.5, "lost")}, {}, "no other may be proposed"),
}


@pytest.mark.parametrize("case", CHECKED)
def test_a_point_with_more_spread_is_taken_if_new_seeds_confirm_it(case):
    first, new, expected = CHECKED[case]
    made = made_up(points(), first, range(1, 5))
    pair = {arm: points()[arm] for arm in (TODAYS_POINT, WIDER)}
    check = made_up(pair, new, range(5, 9)) if new else {}
    assert expected in variety_decision(made, check, TODAYS_POINT, 4)
    made["all of 8"].pop(2)
    assert "Not decided yet" in variety_decision(made, check, TODAYS_POINT, 4)


def test_the_check_of_a_point_is_told_in_numbers():
    made = made_up(points(), HELD, range(1, 5))
    pair = {arm: points()[arm] for arm in (TODAYS_POINT, WIDER)}
    check = made_up(pair, HELD | {WIDER: (0.85, 0.5)}, range(5, 9))
    told = variety_decision(made, check, TODAYS_POINT, 4)
    assert "−0.100 ± 0.000 with the new seeds" in told and "+0.070 ± 0.009 with all" in told
    table = check_table(made, check, TODAYS_POINT)
    assert [line.split(" | ")[1] for line in table.splitlines()[3:]] == ["8", "8"]
    assert "| 0.89 ± 0.03 | −0.060 ± 0.036 |" in table and "| +0.070 ± 0.009 |" in table
    assert check_table(made, {}, TODAYS_POINT) == ""

    lost = made_up(pair, HELD | {WIDER: (0.95, 0.52, "lost")}, range(5, 9))
    assert "(4 of its runs collapsed)" in variety_decision(made, lost, TODAYS_POINT, 4)


def test_guidance_waits_for_the_two_best_that_never_collapsed(tmp_path):
    results = tmp_path / "third.jsonl"
    for number, arm in enumerate(compared_arms()):
        for seed in range(1, 9):
            collapsed = "lost" if number == 11 and seed == 3 else ""
            if (number, seed) == (11, 8):
                assert two_best(results) == []
            records.append(results, result(arm, seed, 0.4 + number / 100, collapsed))
    names = list(compared_arms())
    assert len(names) == 12
    assert two_best(results) == [names[10], names[9]]
    searched = studies(results)["guidance_rates"].arms
    assert len(searched) == 3 * len(RATES)  # of the two and of the reference
    assert {flags["guidance_scale"] for flags in searched.values()} == {2.0}


CENTERED, PLAIN = "nft, best and worst of 8", "nft, best and worst of 8, not centered"


def test_a_centered_arm_differs_in_nothing_else():
    pairs = centered_pairs()
    assert len(pairs) == 3 and pairs[CENTERED] == PLAIN
    for arm, other in pairs.items():
        assert arms()[other] == arms()[arm] | {"center_trained": False}


ALL_LOST = (0.9, 0.44, "lost")
CENTERINGS = {  # match and spread of the runs that are centered and of those that are not, and what is decided
    "better": ((0.95, 0.44), (0.9, 0.44), "stays the default"),
    "better but collapsed": ((0.95, 0.44, "lost"), (0.9, 0.44), "no longer the default"),
    "the same": ((0.9, 0.44), (0.9, 0.44), "no longer the default"),
    "worse": ((0.8, 0.44), (0.9, 0.44), "no longer the default"),
    "only those that are not centered collapse": ((0.9, 0.44), ALL_LOST, "stays the default"),
    "both collapse": (ALL_LOST, ALL_LOST, "no longer the default"),
}


@pytest.mark.parametrize("case", CENTERINGS)
def test_centering_stays_the_default_if_it_is_better(case):
    ends, plain_ends, expected = CENTERINGS[case]
    compared = {arm: arms()[arm] for arm in (CENTERED, PLAIN)}
    made = made_up(compared, {None: plain_ends, CENTERED: ends}, range(1, 9))
    table = partial(centering_table, pairs={CENTERED: PLAIN}, seeds=8)
    assert expected in table(made, {})
    made[PLAIN].pop(3)
    assert "Not decided yet" in table(made, {})
    assert table({}, {}) == "No results yet.\n"


AVERAGED, AVERAGED_CHEAPER = f"{REFERENCE}, averaged", f"{CHEAPER}, averaged"


def test_averaged_arms_are_judged_among_themselves():
    """Averaging lowers the match of all clips too much, and raises that of the best and the worst."""
    names = dict.fromkeys((REFERENCE, CHEAPER, AVERAGED, AVERAGED_CHEAPER), arms()[REFERENCE])
    ends = {None: (0.9, 0.44), AVERAGED: (0.8, 0.44), AVERAGED_CHEAPER: (0.95, 0.44)}
    made = made_up(names, ends, range(1, 9))
    pairs = {AVERAGED: REFERENCE, AVERAGED_CHEAPER: CHEAPER}
    table = partial(averaged_table, pairs=pairs, reference=AVERAGED, seeds=8)
    told = table(made, {})
    assert f"| {REFERENCE} |" not in told and f"| {AVERAGED_CHEAPER} |" in told
    assert f"*{REFERENCE}* does not average its weights" in told
    assert f"*{CHEAPER}* averages its weights" in told
    made[CHEAPER].pop(3)
    assert f"*{AVERAGED_CHEAPER}* is not decided yet" in table(made, {})
    assert table({}, {}) == "No results yet.\n"


def stage_in(words):
    """The studies that a call of ablate.py runs."""
    start = words.index("--studies") + 1
    return tuple(words[start : words.index("--budget_minutes")])


def test_stages_follow_each_other_and_stop_where_runs_are_left(tmp_path, monkeypatch):
    results = tmp_path / "third.jsonl"
    started = []

    def pretended(words, registered, codes):
        stage = stage_in(words)
        started.append(stage)
        return codes.get(stage[0], DONE)

    def start(codes):
        monkeypatch.setattr(third_edition.ablate, "main", partial(pretended, codes=codes))
        return main(["--results", str(results), "--budget_minutes", "9"])

    assert start({"rates": PREEMPTED}) == PREEMPTED
    assert started == [("rates",)]
    assert rates_file(results).is_file()
    started.clear()
    assert start({}) == DONE
    # nothing is at an end, and no result names the best
    assert started == [("rates",), ("clips", "averaged", "centering", "samplers", "variety")]


def test_only_arms_with_a_known_rate_begin_beside_the_search():
    found = {"known": {"learning_rate": 1e-4}, "open": {}}
    made = {name: Study("?", found, seeds=8) for name in ("further_rates", "clips")}
    begun = beside_the_search(made)
    assert begun["further_rates"] is made["further_rates"]
    assert list(begun["clips"].arms) == ["known"] and begun["clips"].seeds < 8


def test_a_failed_run_stops_a_search_but_no_comparison(tmp_path, monkeypatch):
    arm = {"arm": {"learning_rate": 1e-4}}
    ready = {name: Study("?", arm) for stage in STAGES for name in stage}
    monkeypatch.setattr(third_edition, "studies", lambda *_: ready)
    started = []

    def pretended(words, registered, failing):
        started.append(stage_in(words))
        return FAILED if started[-1][0] == failing else DONE

    for failing, reached in {"clips": len(STAGES), "variety_check": 4, "rates": 1}.items():
        started.clear()
        monkeypatch.setattr(third_edition.ablate, "main", partial(pretended, failing=failing))
        assert main(["--results", str(tmp_path / "third.jsonl")]) == FAILED
        assert started == list(STAGES[:reached])


@pytest.mark.parametrize("is_searched", [False, True])
def test_a_comparison_that_fails_beside_a_search_stops_nothing(tmp_path, monkeypatch, is_searched):
    results = tmp_path / "third.jsonl"
    ready = {name: Study("?", {}) for stage in STAGES for name in stage}
    ready["further_rates"] = Study("?", {"arm": {"learning_rate": 1e-4}})
    ready["clips"] = Study("?", {"arm": {"learning_rate": 3e-4}})
    monkeypatch.setattr(third_edition, "studies", lambda *_: ready)
    if is_searched:
        for made in StudyPlan(["further_rates"], None, RECIPE, ready).runs.values():
            records.append(results, invented(made))
    started = []

    def pretended(words, registered):
        started.append(stage_in(words))
        return FAILED

    monkeypatch.setattr(third_edition.ablate, "main", pretended)
    assert main(["--results", str(results)]) == FAILED
    assert started[0] == ("further_rates", "clips")
    assert (len(started) > 1) == is_searched


def test_a_rehearsal_is_never_a_result(capsys):
    assert main(["--tiny"]) == WRONG_INPUT
    assert "--results" in capsys.readouterr().err
    assert main(["--studies", "clips"]) == WRONG_INPUT


def test_all_stages_lead_to_the_page_of_results(tmp_path, monkeypatch):
    """Runs are pretended: nft is best, most with half of its clips or fewer; all learn most at the highest rate."""
    results = tmp_path / "third.jsonl"
    started = []

    def pretended(words, registered):
        stage = stage_in(words)
        started.append(stage)
        for made in StudyPlan(stage, None, RECIPE, registered).runs.values():
            is_best = made.study != "clips" or made.arm.startswith("nft")
            gain = 0.3 + is_best * 0.1 + made.config.learning_rate
            best_match = 0.95 + {4: 0.02, 3: -0.02}.get(made.config.tail_steps, 0)
            best_match += (made.arm in ("nft, 4 of 8", "nft, best and worst of 16")) / 100
            record = invented(made, gain, match=best_match if is_best else 0.5 + made.seed / 100)
            spread = 0.52 if made.config.kl_weight == 3 else 0.44
            end = {SPREAD: spread + made.seed / 1000, PLACES: 0.1}
            unmeasured = dict.fromkeys(("classes", "places", "match"), 0.4)
            ends = {"base": unmeasured | SPREADS["base"], "end": unmeasured | end}
            record |= {"spread": ends} if "spread" in made.measured else {}
            records.append(results, record)
        return DONE

    drawn = []

    def drawn_if_new(path, drawing):
        drawn.append(path.stem)
        if path.stem == "results_3_variety":
            draw(path, drawing)

    draw = third_edition.results_page.draw
    monkeypatch.setattr(third_edition.ablate, "main", pretended)
    monkeypatch.setattr(third_edition.results_page, "draw", drawn_if_new)
    assert main(["--results", str(results)]) == DONE
    # every arm is searched beyond the ends, so none has a rate to begin with beside that
    assert started == [("rates",), ("further_rates",), *STAGES[2:]]
    registered = studies(results)
    for name in ("clips", "samplers", "variety"):
        assert {flags["learning_rate"] for flags in registered[name].arms.values()} == {3e-3}
    assert list(registered["variety_check"].arms) == [TODAYS_POINT, WIDER]
    guided_arms = registered["guidance"].arms
    assert len(guided_arms) == 3
    assert all(arm.startswith("nft, ") for arm in guided_arms)
    runs = [run["study"] for run in records.read_all(results).values()]
    assert {name: runs.count(name) for name in ("samplers", "variety", "variety_check")} == {
        "samplers": 36, "variety": 32, "variety_check": 4,
    }  # fmt: skip

    started.clear()
    page_of_results = tmp_path / "results_3.md"
    assert third_edition.summary(results, page_of_results) == DONE
    text = page_of_results.read_text()
    assert text.count("| verdict |") == 5
    assert f"the recipes take **{WIDER}**" in text
    assert "centering is no longer the default" in text
    assert f"dpm, 4 steps instead of {TODAYS_SAMPLER}" in text
    assert set(drawn) >= {f"results_3_{name}" for name in ("clips", "samplers", "variety")}
    assert (tmp_path / "figures" / "results_3_variety.png").stat().st_size > 10_000
