"""Weights, names and failures: any failure of a reward gives NaN for its clips, and the reason is kept."""

import math
import re
import signal
import threading
import time

import pytest
import torch

from sage_grpo.background import within
from sage_grpo.rewards.base import Composite
from sage_grpo.rewards.reserved import RESERVED_NAMES
from sage_grpo.worlds.shapes.reward import ShapesReward

CLIPS = [torch.full((5, 4, 4, 3), value, dtype=torch.uint8) for value in (0, 50, 100, 150, 200)]
PROMPTS = ["p"] * 5


class Brightness:
    """Scores a clip by its brightness; the subclasses break in one way each."""

    names = ("light", "dark")

    def check(self, prompts):
        pass

    def score(self, clips, prompts, fps):
        light = torch.tensor([clip.float().mean().item() / 100 for clip in clips])
        return {"light": light, "dark": 1 - light}


class Raises(Brightness):
    def score(self, clips, prompts, fps):
        if any(clip.float().mean() == 100 for clip in clips):
            raise RuntimeError("out of memory")
        return super().score(clips, prompts, fps)


class TimesOut(Raises):
    """Its own connection fails, as those of urllib, sockets and asyncio do."""

    def score(self, clips, prompts, fps):
        try:
            return super().score(clips, prompts, fps)
        except RuntimeError:
            raise TimeoutError("the read timed out") from None


class UnprintableError(Exception):
    def __str__(self):
        raise ValueError("no text")


class RaisesUnprintable(Raises):
    def score(self, clips, prompts, fps):
        try:
            return super().score(clips, prompts, fps)
        except RuntimeError:
            raise UnprintableError from None


class Paints(Brightness):
    """Changes the clips that it is given."""

    def score(self, clips, prompts, fps):
        scores = super().score(clips, prompts, fps)
        for clip in clips:
            clip.fill_(255)
        return scores


class EndsTheProgram(Brightness):
    """Raises what is no Exception, and would end a program that does not expect it."""

    def __init__(self, error):
        self.error = error

    def check(self, prompts):
        raise self.error

    def score(self, clips, prompts, fps):
        raise self.error


class GivesNaN(Brightness):
    def score(self, clips, prompts, fps):
        scores = super().score(clips, prompts, fps)
        scores["light"][scores["light"] == 1.0] = math.inf
        return scores


class WrongLength(Brightness):
    def score(self, clips, prompts, fps):
        return {name: values[:-1] for name, values in super().score(clips, prompts, fps).items()}


class WrongNames(Brightness):
    def score(self, clips, prompts, fps):
        return {
            "light": super().score(clips, prompts, fps)["light"],
            "shade": torch.zeros(len(clips)),
        }


class ReadsPrompts(Brightness):
    """Scores are the numbers that the prompts are."""

    def score(self, clips, prompts, fps):
        numbers = torch.tensor([float(prompt) for prompt in prompts])
        return {"light": numbers, "dark": torch.tensor([clip.float().mean() for clip in clips])}


class Hangs(Brightness):
    calls = 0

    def score(self, clips, prompts, fps):
        self.calls += 1
        time.sleep(30)


def composite(reward, weights=None, **options):
    return Composite({"b": reward}, weights or {"light": 2.0, "dark": 0.5}, **options)


def test_total_is_the_weighted_sum_in_batches_of_any_size():
    expected = [2 * v / 100 + 0.5 * (1 - v / 100) for v in (0, 50, 100, 150, 200)]
    for size in (1, 2, 5, 9):
        scores = composite(Brightness(), batch_size=size).score(CLIPS, PROMPTS, 8)
        assert scores.total.tolist() == pytest.approx(expected)
        assert not scores.errors


def test_a_clip_that_is_missing_fails_alone():
    scores = composite(Brightness()).score([CLIPS[0], None, *CLIPS[2:]], PROMPTS, 8)
    assert scores.total.isnan().tolist() == [False, True, False, False, False]
    assert not scores.errors


def test_every_clip_is_scored_with_its_own_prompt():
    reward = composite(ReadsPrompts(), batch_size=2)
    named = reward.score([CLIPS[0], None, *CLIPS[2:]], ["10", "11", "12", "13", "14"], 8).named
    decoded = [0, 2, 3, 4]
    assert named["light"][decoded].tolist() == [10, 12, 13, 14]
    assert named["dark"][decoded].tolist() == [0, 100, 150, 200]


@pytest.mark.parametrize(
    "reward, lost, words",
    [
        (Raises(), [2, 3], "b: RuntimeError: out of memory"),
        (TimesOut(), [2, 3], "b: TimeoutError: the read timed out .*test_composite"),
        (RaisesUnprintable(), [2, 3], "b: UnprintableError: .*cannot be shown"),
        (GivesNaN(), [2], "1 score"),
        (WrongLength(), [0, 1, 2, 3, 4], r"light has shape \(1,\) for 2 clips"),
        (WrongNames(), [0, 1, 2, 3, 4], "the scores are light, shade; expected light, dark"),
    ],
    ids=["raises", "times out", "unprintable", "nan", "length", "names"],
)
def test_a_failure_is_nan_for_the_clips_it_concerns(reward, lost, words):
    scores = composite(reward, batch_size=2).score(CLIPS, PROMPTS, 8)
    assert scores.total.isnan().nonzero().flatten().tolist() == lost
    assert re.search(words, scores.errors[0])


def test_a_reward_cannot_change_the_clips_of_others():
    clips = [clip.clone() for clip in CLIPS]
    rewards = {"a": Paints(), "b": Brightness()}
    scores = Composite(rewards, None, batch_size=2).score(clips, PROMPTS, 8)
    assert torch.equal(scores.named["a.light"], scores.named["b.light"])
    assert all(map(torch.equal, clips, CLIPS))


def test_a_reward_that_hangs_is_left_behind_and_not_asked_again():
    reward = Hangs()
    start = time.monotonic()
    scores = composite(reward, batch_size=2, timeout=0.2).score(CLIPS, PROMPTS, 8)
    assert time.monotonic() - start < 10
    assert scores.total.isnan().all()
    assert scores.errors == ["b: no answer within 0.2 s"]
    assert reward.calls == 1


def test_a_score_that_weighs_nothing_may_fail():
    scores = composite(GivesNaN(), {"light": 0.0, "dark": 1.0}).score(CLIPS, PROMPTS, 8)
    assert scores.total.isfinite().all()
    assert scores.named["light"].isnan().sum() == 1


def test_several_rewards_are_named_apart():
    both = Composite(
        {"a": Brightness(), "b": Brightness()}, {"a": {"light": 1.0}, "b": {"dark": 10.0}}
    )
    scores = both.score(CLIPS[:2], PROMPTS[:2], 8)
    assert both.names == ("a.light", "a.dark", "b.light", "b.dark")
    assert scores.total.tolist() == pytest.approx([10.0, 5.5])


def test_a_reward_that_is_only_measured_is_noted():
    both = {"a": Brightness(), "b": Brightness()}
    for weights in ({"a": {"light": 1.0}}, {"a": {"light": 1.0}, "b": {"light": 0}}):
        assert Composite(both, weights).note == "the reward b has weight 0 and is only measured"
    assert not Composite(both, {"a": {"light": 1.0}, "b": {"dark": -1.0}}).note


@pytest.mark.parametrize(
    "weights, words",
    [
        ({"bright": 1.0}, "names bright, not a score of b; give --reward_weights .*light.*dark"),
        ({"b": 1.0}, "a number for each of b's light, dark"),
        ({"light": 0.0}, "all 0"),
        ({"light": "much"}, "must be a number"),
        ({"light": math.nan}, "must be a number"),
    ],
)
def test_weights_that_cannot_be_used_are_refused(weights, words):
    with pytest.raises(ValueError, match=words):
        composite(Brightness(), weights)


class Dimness(Brightness):
    names = ("dim",)

    def score(self, clips, prompts, fps):
        return {"dim": super().score(clips, prompts, fps)["dark"]}


def test_an_only_reward_with_an_only_score_needs_no_weights():
    of_a_recipe = {"VQ": 0.5, "MQ": 0.25, "TA": 2.0}
    for weights in (of_a_recipe, {"videoalign": of_a_recipe, "first_frame": 2.0}):
        alone = Composite({"shade": Dimness()}, weights)
        assert alone.weights == {"dim": 1.0}
        assert "VQ" in alone.note or "videoalign" in alone.note

    for weights in ({"dim": 3.0}, {"shade": 3.0}, {"shade": {"dim": 3.0}}):
        assert Composite({"shade": Dimness()}, weights).weights == {"dim": 3.0}
        assert not Composite({"shade": Dimness()}, weights).note
    for weights in ({"shaed": -1.0}, {"dmi": -1.0}, {"VQ": 0.5, "dmi": 1.0}):  # slips
        with pytest.raises(ValueError, match="reward_weights names"):
            Composite({"shade": Dimness()}, weights)
    with pytest.raises(ValueError, match="reward_weights names VQ"):
        composite(Brightness(), of_a_recipe)


def test_a_weight_for_a_reward_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="reward_weights names c; the rewards are a, b"):
        Composite(
            {"a": Brightness(), "b": Brightness()}, {"a": {"light": 1.0}, "c": {"light": 1.0}}
        )


def test_within_hands_on_results_and_errors_without_gradients():
    assert within(5, lambda x: x + 1, 2) == 3
    assert within(5, torch.is_grad_enabled) is False
    with pytest.raises(KeyError):
        within(5, {}.__getitem__, "missing")


@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt(), GeneratorExit()])
def test_a_reward_cannot_end_the_program(error):
    scores = composite(EndsTheProgram(error), batch_size=5).score(CLIPS, PROMPTS, 8)
    assert scores.total.isnan().all()
    assert type(error).__name__ in scores.errors[0]


def test_a_check_cannot_end_the_program():
    with pytest.raises(ValueError, match=r"the reward b .*SystemExit"):
        composite(EndsTheProgram(SystemExit(0))).check(PROMPTS)


def test_ctrl_c_still_ends_a_program_that_waits_for_a_reward():
    main = threading.main_thread().ident
    threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        composite(Hangs()).score(CLIPS, PROMPTS, 8)


def test_odd_failures_of_a_reward_are_failures():
    class CountsFailures(Brightness):
        failures = 3

    scores = composite(CountsFailures(), batch_size=5).score(CLIPS, PROMPTS, 8)
    assert scores.total.isnan().all()
    assert "TypeError" in scores.errors[0]


@pytest.mark.parametrize(
    "name", [*RESERVED_NAMES, "VQ_stderr", "", "\033[2J", "a\nb", 5], ids=ascii
)
def test_names_that_the_metrics_use_or_that_cannot_be_shown_are_no_names_of_scores(name):
    class Named(Brightness):
        names = (name,)

    with pytest.raises(ValueError, match="a score is called "):
        Composite({"b": Named()}, None)


def test_two_scores_of_one_name_are_refused():
    class Twice(Brightness):
        names = ("light", "light")

    with pytest.raises(ValueError, match="two scores are called light"):
        Composite({"b": Twice()}, None)


@pytest.mark.parametrize("weight", [10**400, -(10**400), 1e308, float("nan"), "x"])
def test_a_weight_is_a_number_of_a_size_that_sums_can_hold(weight):
    with pytest.raises(ValueError, match="it must be a number of at most"):
        Composite({"shapes": ShapesReward()}, {"VQ": weight})
