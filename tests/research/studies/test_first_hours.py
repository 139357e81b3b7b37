"""When a gain can be told from chance, from recorded runs."""

import pytest

from research.benchmarks.recipe_tables import UPDATES_TO_VERDICT
from research.studies import first_hours as script
from research.studies.records import read_all
from research.studies.second_edition import RESULTS


@pytest.fixture(scope="module")
def records():
    return list(read_all(RESULTS).values())


def test_pages_name_the_updates_until_a_verdict(records):
    """docs/running.md and docs/scaling.md say 19, 7 and 5; the tables of recipes take a little more."""
    counts = [
        round(script.updates_to_verdict(script.runs_of(arm, records), 64)) for arm in script.ARMS
    ]
    assert counts == [19, 7, 5]
    assert UPDATES_TO_VERDICT["grpo"] - counts[0] in (0, 1)
    assert UPDATES_TO_VERDICT["nft"] - counts[1] in (0, 1)


def test_more_clips_decide_smaller_gains(records):
    runs = script.runs_of(script.ARMS[0], records)
    few, many = script.decidable_gain(runs, 16), script.decidable_gain(runs, 64)
    assert 2 < few / many < 2.2  # twice by the root of the number, and a little by Student's t
    # a run that gains nothing is never decided
    assert script.decidable_gain(runs, 3) > script.gains(runs)[1].max()


def test_moments_are_in_order():
    for recipe, cards in script.RECIPES:
        plan = script.planned(f"| [r](configs/{recipe}.yaml) | {cards} |")
        hours = script.moments(plan)
        assert list(hours) == list(script.MARKERS)
        assert list(hours.values()) == sorted(hours.values())
