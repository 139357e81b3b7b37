"""The clips of a group that are trained, against the rule in words."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sage_grpo.algo.grpo import group_advantages
from sage_grpo.algo.selection import extreme_rows


def by_hand(values, usable, group_size, count):
    """The rule as a sentence: front and back of the clips by (falling advantage, number), then the first others."""
    rows = []
    for start in range(0, len(values), group_size):
        numbers = range(start, start + group_size)
        ranked = sorted((n for n in numbers if usable[n]), key=lambda n: (-values[n], n))
        while len(ranked) > count:
            # the one that lies deepest: after the front that is kept
            ranked.pop(math.ceil(count / 2))
        ranked += [n for n in numbers if not usable[n]][: count - len(ranked)]
        rows += sorted(ranked)
    return rows


@given(data=st.data(), group_size=st.integers(2, 7), groups=st.integers(1, 3))
def test_rows_are_those_of_the_rule(data, group_size, groups):
    count = data.draw(st.integers(1, group_size))
    size = group_size * groups
    values = data.draw(
        st.lists(st.sampled_from([-2.0, -0.5, 0.0, 0.5, 2.0]), min_size=size, max_size=size)
    )
    usable = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    rows = extreme_rows(torch.tensor(values), torch.tensor(usable), group_size, count)
    assert rows.tolist() == by_hand(values, usable, group_size, count)


def test_no_other_choice_has_larger_advantages():
    """The chosen clips have the largest sum of distances among all choices with two clips from each end."""
    values = torch.tensor([0.3, -1.2, 0.9, -0.1, 1.4, -0.7])
    rows = extreme_rows(values, torch.ones(6, dtype=torch.bool), 6, 4).tolist()

    def spread(chosen):
        ranked = sorted(values[list(chosen)].tolist())
        return sum(ranked[2:]) - sum(ranked[:2])

    assert spread(rows) == max(map(spread, itertools.combinations(range(6), 4)))


CASES = {  # rewards of a group of 4, how many are trained, and which
    "best and worst": ([1, 4, 2, 3], 2, [0, 1]),
    "an odd number takes one more of the best": ([1, 4, 2, 3], 3, [0, 1, 3]),
    "equal ones: the first of the best, the last of the worst": ([5, 5, 1, 1], 2, [0, 3]),
    "failed ones are passed over": ([math.nan, 4, 2, 3], 2, [1, 2]),
    "failed ones fill up": ([math.nan, 4, math.nan, 3], 3, [0, 1, 3]),
    "a flat group gives its first clips": ([2, 2, 2, 2], 2, [0, 1]),
    "a group with one reward too": ([math.nan, math.nan, math.nan, 1], 2, [0, 1]),
    "all": ([1, 4, 2, 3], 4, [0, 1, 2, 3]),
}


@pytest.mark.parametrize("name", CASES)
def test_cases_that_the_documentation_names(name):
    rewards, count, expected = CASES[name]
    other_group = [1.0, 2.0, 3.0, 4.0]
    advantages = group_advantages(torch.tensor([*rewards, *other_group]), torch.arange(8) // 4)
    rows = extreme_rows(advantages.values, advantages.trained, 4, count).tolist()
    assert rows[:count] == expected
    assert len(rows) == 2 * count

    chosen = advantages.at(torch.tensor(rows))
    assert chosen.values.tolist() == [advantages.values[row].item() for row in rows]
    assert chosen.failed == advantages.failed


@pytest.mark.parametrize("count", [0, 5])
def test_a_count_beyond_the_group_is_rejected(count):
    with pytest.raises(ValueError, match="train_clips"):
        extreme_rows(torch.zeros(4), torch.ones(4, dtype=torch.bool), 4, count)
