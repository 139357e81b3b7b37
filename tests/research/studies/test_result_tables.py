"""Known differences get the correct verdict."""

import math

import numpy as np
import pytest

from research.studies import result_tables as tables
from research.studies.questions import Study, StudyPlan, identity
from tests.research.studies.invented_results import invented

STUDIES = {
    "demo": Study(
        "Which?",
        {"base": {}, "good": {"eta": 0.8}, "same": {"eta": 0.9}, "bad": {"eta": 0.6}},
        seeds=8,
    ),
    "table2": Study("All?", {"base": {}, "good": {"eta": 0.8}}, seeds=3),
}
PLAN = StudyPlan(studies=STUDIES)
SHIFTS = (0.01, -0.02, 0.03, -0.01, 0.02, -0.03, 0.04, -0.04)  # of the seeds, shared by all arms
NOISE = (0.02, 0.01, -0.02, -0.01, 0.03, -0.03, 0.01, -0.01)  # of one arm; adds up to 0
EFFECTS = {
    "base": (0.0, 0.6, 0.05),
    "good": (0.1, 0.7, 0.045),
    "same": (0.0, 0.6, 0.05),
    "bad": (-0.1, 0.5, 0.06),
}


def records(seeds=range(1, 9), skipped=(), effects=EFFECTS):
    found = {}
    for (study, arm, seed), key in PLAN.keys.items():
        if study == "demo" and seed in seeds and (arm, seed) not in skipped:
            gain, match, distance = effects[arm]
            noise = 0.0 if arm == "base" else NOISE[seed - 1]
            words = (0.3 + gain + SHIFTS[seed - 1] + noise, match + noise, distance + noise / 10)
            found[key] = invented(PLAN.runs[key], *words)
    return found


def compared(found):
    return tables.compared(STUDIES["demo"], tables.arms_of(PLAN, "demo", STUDIES["demo"], found))


def test_a_known_difference_is_found_in_pairs():
    """The spread over seeds is common to both arms, so it leaves the difference; the interval is by hand."""
    found = compared(records())["good"]["reward"]
    deviation = math.sqrt(sum(x * x for x in NOISE) / 7)
    assert found.pairs == 8 and found.change.mean == pytest.approx(0.1)
    assert found.change.half == pytest.approx(2.365 * deviation / math.sqrt(8), rel=0.01)
    verdicts = {
        arm: {name: d.verdict for name, d in measures.items()}
        for arm, measures in compared(records()).items()
    }
    assert (
        verdicts["good"]["reward"]
        == verdicts["good"]["gold match"]
        == verdicts["good"]["gold distance"]
        == 1
    )
    assert (
        verdicts["bad"]["reward"]
        == verdicts["bad"]["gold match"]
        == verdicts["bad"]["gold distance"]
        == -1
    )
    assert set(verdicts["same"].values()) == {0}


def test_three_arms_need_more_evidence_than_one():
    """An effect that would pass alone, p about 0.03, is undecided beside two others without any."""
    effects = EFFECTS | {"good": (0.02, 0.6, 0.05), "bad": (0.0, 0.6, 0.05)}
    found = compared(records(effects=effects))["good"]["reward"]
    assert found.change.sign == 1 and 0.05 < found.p < 0.15 and found.verdict == 0
    study = Study("Which?", {arm: STUDIES["demo"].arms[arm] for arm in ("base", "good")}, seeds=8)
    arms = tables.arms_of(PLAN, "demo", STUDIES["demo"], records(effects=effects))
    alone = tables.compared(study, {arm: arms[arm] for arm in study.arms})["good"]["reward"]
    assert (
        alone.change == found.change
        and alone.p == pytest.approx(found.p / 3)
        and alone.verdict == 1
    )


def test_arms_that_are_not_run_yet_count_as_asked():
    """Else a verdict would change when they are."""
    found = {key: record for key, record in records().items() if record["arm"] in ("base", "good")}
    one, all_three = compared(found)["good"]["reward"], compared(records())["good"]["reward"]
    assert one.change == all_three.change and one.p == pytest.approx(all_three.p)


def test_two_pairs_decide_nothing():
    found = compared(records(seeds=(1, 2)))["good"]["reward"]
    assert found.pairs == 2 and found.verdict == 0 and tables.shown(found, 3) == "+0.115"


def test_seeds_without_a_partner_are_left_out():
    found = compared(records(skipped={("good", 3), ("base", 5)}))
    assert found["good"]["reward"].pairs == 6 and found["bad"]["reward"].pairs == 7


def test_gold_at_equal_reward():
    """Where the better one has the reward that the other ends with, it has lost half of what it will lose."""
    runs = [PLAN.runs[PLAN.keys["demo", arm, 1]] for arm in ("good", "base")]
    far, near = invented(runs[0], gain=0.4, match=0.4), invented(runs[1], gain=0.2, match=0.55)
    assert tables.at_equal_reward(far, near, "gold/match") == pytest.approx(0.5)
    assert tables.at_equal_reward(near, far, "gold/match") == pytest.approx(0.55)
    fallen = invented(runs[1], gain=-0.1, match=0.3)
    assert math.isnan(
        tables.at_equal_reward(far, fallen, "gold/match")
    )  # equal at the start says nothing
    assert math.isnan(tables.at_equal_reward(fallen, far, "gold/match"))
    stopped = invented(runs[1], gain=0.2, match=0.55, collapsed="stopped")
    assert math.isnan(tables.at_equal_reward(far, stopped, "gold/match"))
    for record in (far, near):
        record["validation"] = {name: values[:1] for name, values in record["validation"].items()}
    assert math.isnan(tables.at_equal_reward(far, near, "gold/match"))


def test_stopped_runs_are_counted_and_leave_the_pairs():
    found = records()
    key = PLAN.keys["demo", "good", 2]
    found[key] = invented(PLAN.runs[key], collapsed="the gradient was not finite")
    assert compared(found)["good"]["reward"].pairs == 7
    text = tables.tables(PLAN, STUDIES, found)["demo"]
    assert "| good | 8 | 1 |" in text and "| base | 8 | 0 |" in text


def test_the_words_of_the_table():
    text = tables.tables(PLAN, STUDIES, records())["demo"]
    assert "| good minus base | 8 | +0.100 (+0.083 to +0.117), p 8e-06: **better** |" in text
    assert (
        "p-values corrected over 3 comparisons" in text
        and "**worse**" in text
        and "undecided" in text
    )


def test_table_2_has_the_base_model_and_intervals_over_seeds():
    keys = {arm: [PLAN.keys["table2", arm, seed] for seed in (1, 2, 3)] for arm in ("base", "good")}
    found = {
        key: invented(PLAN.runs[key], 0.2 + 0.1 * place)
        for arm in keys
        for place, key in enumerate(keys[arm])
    }
    rows = tables.tables(PLAN, STUDIES, found)["table2"].splitlines()
    assert (
        rows[2]
        == "| method | runs | Overall | VQ | MQ | TA | gold match | gold prompt distance | gold distance |"
    )
    assert rows[4] == "| base model |  | 1.000 | 0.400 | 0.400 | 0.200 | 0.600 | 0.0500 | 0.0500 |"
    assert rows[5].startswith("| base | 3 | 1.450 ± 0.373 | 0.550 ± 0.124 |")


def test_a_page_keeps_its_words_and_gets_new_tables():
    page = "before\n<!-- results demo -->\nold\n<!-- end of results -->\nafter\n"
    page += "<!-- results none -->\n<!-- end of results -->\n"
    made = {"demo": "new\n"}
    found = tables.refreshed(page, made)
    assert (
        "before\n<!-- results demo -->\nnew\n<!-- end of results -->\nafter\n" in found
        and "old" not in found
    )
    assert "No results yet." in found and tables.refreshed(found, made) == found


def test_arms_without_results_are_named_and_have_no_row():
    found = {
        key: record for key, record in records().items() if record["arm"] not in ("good", "bad")
    }
    text = tables.tables(PLAN, STUDIES, found)["demo"]
    assert (
        "Not run yet: good; bad.\n" in text
        and "| same minus base | 8 |" in text
        and "| good" not in text
    )
    found = {
        key: record for key, record in records().items() if record["arm"] not in ("base", "bad")
    }
    text = tables.tables(PLAN, STUDIES, found)["demo"]
    assert "Not run yet: base; bad.\n" in text and "minus" not in text


def test_pairs_that_one_measure_lacks_are_told():
    found = records()
    key = PLAN.keys["demo", "good", 2]
    found[key] = invented(PLAN.runs[key], gain=-0.5)  # never gained: not comparable at equal reward
    lines = tables.tables(PLAN, STUDIES, found)["demo"].splitlines()
    (row,) = (line for line in lines if line.startswith("| good minus base | 8 |"))
    assert row.count("(7 pairs)") == 2


def test_a_caption_says_what_is_decided():
    caption = tables.tables(PLAN, STUDIES, records())["demo"].splitlines()[0]
    assert caption.startswith("*Decided at the end: good minus base: reward +")
    assert "; bad minus base: reward −" in caption
    assert "same minus base" not in caption and caption.endswith(". All else there is undecided.*")
    found = {key: record for key, record in records().items() if record["arm"] in ("base", "same")}
    assert tables.tables(PLAN, STUDIES, found)["demo"].startswith(
        "*No difference at the end is decided.*\n"
    )


def test_a_shared_arm_alone_is_no_answer():
    alone = {key: record for key, record in records().items() if record["arm"] == "base"}
    assert set(tables.tables(PLAN, STUDIES, alone)) == {"per_step", "runs"}


def test_statistics_by_step_and_the_origin_of_the_runs():
    studies = {
        "equalizer": Study("What?", {"on": {}, "off": {"use_grad_balancing": False}}, seeds=2)
    }
    plan = StudyPlan(studies=studies)
    found = {key: invented(run) for key, run in plan.runs.items()}
    next(iter(found.values()))["device"] = "GPU"
    made = tables.tables(plan, studies, found)
    norms, shares = "1000.0, 2000.0, 4000.0, 8000.0, –", "6.7, 13.3, 26.7, 53.3, –"
    assert f"| equalizer | off | 2 | {norms} | {shares} | 10.0, 10.0 | 0.52 |" in made["per_step"]
    assert "| CPU | None | abc | 3 |" in made["runs"] and "| GPU | None | abc | 1 |" in made["runs"]


def test_the_pull_of_the_kl_depends_on_the_sampler():
    """By hand from |b|/std = 0.0617, 0.1978, 0.3735, 0.7161 of sage's four exploring steps."""
    scale = np.array([0.0617, 0.1978, 0.3735, 0.7161])
    config = identity(next(iter(PLAN.runs.values())).config)
    assert tables.kl_pull(config) == pytest.approx((scale**2).mean() / 0.1978, rel=1e-3)
    assert tables.kl_pull(config | {"use_grad_balancing": False}) == pytest.approx(
        (scale**2).sum() / scale.sum(), rel=1e-3
    )
    assert tables.kl_pull(config | {"use_kl_balancing": True}) == pytest.approx(0.1978, rel=1e-3)
    twenty = {"num_sampling_steps": 20, "sde_window": "all", "eta": 0.5, "timestep_shift": 5.0}
    assert tables.kl_pull(config | twenty) == pytest.approx(3.70, abs=0.01)
