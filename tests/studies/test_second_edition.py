"""The second edition: what is registered is what would run, at equal compute."""

import json

import pytest

from studies import second_edition
from studies.questions import StudyPlan
from studies.second_edition import (
    EQUAL_ENERGY,
    METHODS,
    PAGE,
    RATES,
    RECIPE,
    SEARCH,
    choose,
    config_of,
    energy,
    page,
    studies,
    units,
)  # fmt: skip


def test_the_committed_page_is_what_would_run():
    assert PAGE.read_text(encoding="utf-8") == page(), "write it again, before any run: studies.second_edition --page"


def test_units_are_those_of_the_formula():
    """(prefix / G + window + tail) + anchor + 3.7 window, and decode and reward (docs/efficiency.md)."""
    published = config_of(METHODS["published"])
    assert units(published) == pytest.approx(10 + 0.9 * 10 + 3.7 * 10 + 4.5)  # a moving anchor rests once in 10
    flash = config_of(METHODS["flash, 1 step per prompt"] | {"use_moving_KL": False})
    before = sum(range(9)) / 9  # of a window of one step that never is the last
    assert units(flash) == pytest.approx(before / 8 + 1 + min(3, 9 - before) + 1 + 3.7 + 4.5, abs=0.6)


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
    assert len({config_of(flags).max_steps for flags in studies()["head_to_head"].arms.values()}) > 4


def test_arms_of_the_batches_have_equally_many_clips():
    arms = [config_of(flags) for flags in studies()["batches"].arms.values()]
    assert {one.batch_size * one.max_steps for one in arms} == {5120} and len({one.batch_size for one in arms}) == 6


def test_the_search_uses_no_seed_that_is_reported():
    plan = StudyPlan((), None, RECIPE, studies())
    seeds = {name: {seed for study, _, seed in plan.keys if study == name} for name in studies()}
    searches = ("rates", "batch_rates", "kl_weights")
    assert all(seeds[name] == ({SEARCH["first_seed"]} if name in searches else set(range(1, 9))) for name in studies())


def test_the_best_rate_that_did_not_collapse_is_chosen(tmp_path, monkeypatch):
    for arm, rewards in {"flow": (1.0, 2.0, 5.0), "nft": (3.0, 2.0, 1.0)}.items():
        for rate, reward in zip(RATES, rewards, strict=True):
            record = {
                "arm": f"{arm}, {rate:g}",
                "config": {"learning_rate": rate},
                "collapsed": "lost" if reward == 5 else "",
            }
            record["validation"] = {"reward/total": [0.0, reward]}
            (tmp_path / f"rates-{arm}-{rate:g}.json").write_text(json.dumps(record))
    (tmp_path / "rates-cps-1.json").write_text(json.dumps(record | {"arm": "cps, 0.001"}))  # not finished
    monkeypatch.setattr(second_edition.records, "read", lambda path: json.loads(path.read_text()))
    assert choose(tmp_path) == {"flow": RATES[1], "nft": RATES[0]}
