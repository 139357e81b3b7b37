"""The second edition: what is registered is what would run, at equal compute."""

import pytest

from research.studies import records, second_edition
from research.studies.questions import StudyPlan, digest
from research.studies.second_edition import (  # fmt: skip
    EQUAL_ENERGY,
    METHODS,
    PAGE,
    RATES,
    RECIPE,
    SEARCH,
    SEARCHES,
    chosen,
    config_of,
    energy,
    page,
    studies,
    units,
)
from sage_grpo.exit_codes import DONE, WRONG_INPUT


def test_the_committed_page_is_what_would_run():
    assert PAGE.read_text(encoding="utf-8") == page(), (
        "write it again, before any run: research.studies.second_edition --page"
    )


def test_units_are_those_of_the_formula():
    """(prefix / G + window + tail) + anchor + 3.7 window, and decode and reward (docs/scaling.md)."""
    published = config_of(METHODS["published"])
    assert units(published) == pytest.approx(
        10 + 0.9 * 10 + 3.7 * 10 + 4.5
    )  # a moving anchor rests once in 10
    flash = config_of(METHODS["flash, 1 step per prompt"] | {"use_moving_KL": False})
    before = sum(range(9)) / 9  # of a window of one step that never is the last
    assert units(flash) == pytest.approx(
        before / 8 + 1 + min(3, 9 - before) + 1 + 3.7 + 4.5, abs=0.6
    )


def test_updates_per_rollout_cost_nothing():
    """They share the steps of a rollout: each pair of a clip and a step is trained once."""
    flags = {"use_moving_KL": False}  # whose anchor never rests
    assert units(config_of(flags, {"updates_per_rollout": 2})) == units(config_of(flags))


def test_samplers_add_the_same_noise():
    sage = energy(config_of({}))
    for name, eta in EQUAL_ENERGY.items():
        assert energy(config_of({"sde_type": name, "eta": eta})) == pytest.approx(sage, rel=1e-3)


def test_arms_of_the_head_to_head_cost_the_same():
    spent = []
    for flags in studies()["head_to_head"].arms.values():
        config = config_of(flags)
        spent.append(units(config) * config.batch_size * config.max_steps)
    assert max(spent) / min(spent) < 1.03
    assert (
        len({config_of(flags).max_steps for flags in studies()["head_to_head"].arms.values()}) > 4
    )


def test_arms_of_the_batches_have_equally_many_clips():
    arms = [config_of(flags) for flags in studies()["batches"].arms.values()]
    assert {one.batch_size * one.max_steps for one in arms} == {5120} and len(
        {one.batch_size for one in arms}
    ) == 6


def test_the_search_uses_no_seed_that_is_reported():
    keys = StudyPlan((), None, RECIPE, studies()).keys
    seeds = {name: {seed for study, _, seed in keys if study == name} for name, _, _ in keys}
    names = {"kl_weights", *SEARCHES, *(f"further_{name}" for name in SEARCHES)}
    searches = {name: {SEARCH["first_seed"]} for name in names}
    own = searches | {"raw_weights": {11, 12, 13, 14}}
    own |= {name: {21, 22, 23, 24} for name in ("authors", "shared_window")}
    assert all(found == own.get(name, set(range(1, 9))) for name, found in seeds.items())


@pytest.fixture
def results(tmp_path, monkeypatch):
    """results(study, arm, {rate: reward}) writes what a search found; a reward of None is a collapsed run."""
    monkeypatch.setattr(second_edition, "CHOSEN", tmp_path / "rates.json")
    monkeypatch.setattr(second_edition, "WEIGHTS", tmp_path / "weights.json")
    monkeypatch.setattr(second_edition, "RESULTS", tmp_path / "second.jsonl")

    def write(study, arm, rewards):
        for rate, reward in rewards.items():
            config = {"learning_rate": rate, "train_prompts": f"{study}, {arm}"}  # one digest each
            record = {
                "study": study,
                "arm": f"{arm}, {rate:g}",
                "seed": SEARCH["first_seed"],
                "config": config,
                "digest": digest(config),
                "collapsed": "" if reward else "lost",
                "validation": {"reward/total": [0.0, reward or 9.0]},
            }
            records.append(tmp_path / "second.jsonl", record)
        assert second_edition.main(["--choose"]) == DONE

    return write


def test_the_best_rate_that_did_not_collapse_is_chosen(results):
    results("rates", "flow", dict(zip(RATES, (1.0, 2.0, None), strict=True)))
    results("rates", "cps", {RATES[0]: 1.0})  # not finished
    assert (
        chosen("flow") == {"learning_rate": RATES[1]}
        and chosen("cps") == {}
        and chosen("nft") == {}
    )
    assert "cps" not in " ".join(studies()["further_rates"].arms)


@pytest.mark.parametrize(
    ("rewards", "beyond", "reward", "best"),
    [
        ((3.0, 2.0, 1.0), 3e-5, 4.0, 3e-5),
        ((1.0, 2.0, 3.0), 3e-3, 2.5, 1e-3),
        ((None, None, 3.0), 3e-3, None, 1e-3),
    ],
)
def test_where_the_best_rate_is_at_an_end_the_one_beyond_is_tried(
    results, rewards, beyond, reward, best
):
    results("rates", "flow", dict(zip(RATES, rewards, strict=True)))
    (arm,) = [arm for arm in studies()["further_rates"].arms if arm.startswith("flow")]
    assert studies()["further_rates"].arms[arm]["learning_rate"] == beyond and chosen("flow") == {}
    results("further_rates", "flow", {beyond: reward})
    assert chosen("flow") == {"learning_rate": best}
    assert arm in studies()["further_rates"].arms  # a finished search is still the same study


def test_nothing_is_compared_before_its_rates_are_chosen(results, monkeypatch, capsys):
    started = []
    monkeypatch.setattr(second_edition.ablate, "main", lambda *_: started.append(1) or DONE)
    for arm in METHODS:
        assert second_edition.main(["--studies", "head_to_head"]) == WRONG_INPUT
        assert (
            f"head_to_head has no learning rate for {arm}: run --studies rates to its end"
            in capsys.readouterr().err
        )
        results("rates", arm, dict(zip(RATES, (1.0, 2.0, 1.5), strict=True)))
    assert second_edition.main(["--studies", "head_to_head"]) == DONE and started
    results("rates", "awm", {RATES[0]: 3.0})
    assert second_edition.main(["--studies", "head_to_head"]) == WRONG_INPUT
    assert (
        "no learning rate for awm: run --studies further_rates to its end, then --choose"
        in capsys.readouterr().err
    )
    assert (
        second_edition.main(["--studies", "batches"]) == WRONG_INPUT
        and "batch_rates" in capsys.readouterr().err
    )
