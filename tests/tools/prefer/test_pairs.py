"""Which pairs are drawn, and what a rater's schedule looks like."""

from collections import Counter

import pytest

from sage_grpo.tools.prefer.pairs import APART, Trial, candidates, draw, least_certain, trials
from sage_grpo.tools.prefer.study import Study, StudyClip, StudyError


def clips(systems, prompts, numbers=1):
    return [
        StudyClip(
            "",
            system,
            f"prompt {prompt}",
            seed=prompt,
            number=number,
            scores={"VQ": 10.0 * system + number**2},
        )
        for system in range(systems)
        for prompt in range(prompts)
        for number in range(numbers)
    ]


def study(count, **changes):
    both = clips(2, count)
    return Study(("a", "b"), ("overall",), tuple(both), tuple(candidates(both)), **changes)


def test_systems_are_compared_on_the_same_prompt_seed_and_number():
    three = clips(3, prompts=2, numbers=2)
    pairs = candidates(three)
    assert len(pairs) == 3 * 2 * 2
    for a, b in pairs:
        assert three[a].system != three[b].system
        assert (three[a].prompt, three[a].seed, three[a].number) == (
            three[b].prompt,
            three[b].seed,
            three[b].number,
        )


def test_one_system_is_compared_with_itself_within_a_prompt():
    one = clips(1, prompts=2, numbers=3)
    pairs = candidates(one)
    assert len(pairs) == 2 * 3
    assert all(one[a].prompt == one[b].prompt for a, b in pairs)


@pytest.mark.parametrize("few", [clips(1, 3), [StudyClip("", 0, "a"), StudyClip("", 1, "b")]])
def test_clips_without_a_counterpart_are_pointed_out(few):
    with pytest.raises(StudyError, match="nothing can be compared"):
        candidates(few)


def test_pairs_are_spread_over_prompts_and_systems():
    three = clips(3, prompts=5, numbers=4)
    drawn = draw(three, candidates(three), 30, seed=1)
    prompts = Counter(three[a].prompt for a, _ in drawn)
    systems = Counter((three[a].system, three[b].system) for a, b in drawn)
    assert set(prompts.values()) == {6}
    assert set(systems.values()) == {10}
    assert (
        drawn
        == draw(three, candidates(three), 30, seed=1)
        != draw(three, candidates(three), 30, seed=2)
    )
    assert sorted(draw(three, candidates(three), None, seed=1)) == sorted(candidates(three))


def test_the_least_certain_pairs_come_first():
    one = clips(1, prompts=1, numbers=4)  # scores 0, 1, 4, 9
    assert least_certain(one, candidates(one), 3, ["VQ"]) == [(0, 1), (1, 2), (0, 2)]
    with pytest.raises(StudyError, match="'prompt 0' with seed 0 has no score"):
        least_certain(one, candidates(one), 3, ["TA"])


def test_a_schedule_shows_every_pair_once_and_a_share_of_them_again_with_sides_swapped():
    schedule = trials(study(200, repeat=0.1), "ann")
    first = [trial for trial in schedule if not trial.repeat]
    again = [trial for trial in schedule if trial.repeat]
    assert sorted(trial.pair for trial in first) == list(range(200))
    assert len(again) == len({trial.pair for trial in again}) == 20
    for trial in again:
        earlier = Trial(trial.pair, not trial.swapped)
        assert schedule.index(trial) - schedule.index(earlier) > APART
    swapped = sum(trial.swapped for trial in first)
    assert 75 < swapped < 125


def test_orders_and_sides_differ_by_rater_and_seed_and_are_the_same_every_time():
    same = trials(study(50), "ann")
    assert same == trials(study(50), "ann")
    assert same != trials(study(50), "bob")
    assert same != trials(study(50, seed=1), "ann")
    ordered = [trial.pair for trial in trials(study(50, ordered=True, repeat=0.0), "ann")]
    assert ordered == list(range(50))


def test_orders_and_sides_follow_from_the_secret_of_a_study():
    one = trials(study(50, secret="a"), "ann")
    assert one == trials(study(50, secret="a"), "ann")
    assert one != trials(study(50, secret="b"), "ann")
    assert one != trials(study(50), "ann")
    # studies without a secret go on as they began
    assert [trial.pair for trial in trials(study(6, repeat=0.0), "ann")] == [5, 4, 3, 1, 0, 2]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_pairs_can_all_be_repeated(count):
    schedule = trials(study(count, repeat=1.0), "ann")
    assert Counter(trial.pair for trial in schedule) == dict.fromkeys(range(count), 2)
    first = {trial.pair: i for i, trial in reversed(list(enumerate(schedule)))}
    assert all(not schedule[i].repeat for i in first.values())
