"""Known edits of good clips: what they do, and which responses of a reward are right, wrong or undecided."""

import pytest
import torch

from sage_grpo.intervals import Interval
from sage_grpo.rewards.base import Composite
from sage_grpo.tools.audit import (
    EDITS,
    FLIPPED,
    WRONG_PROMPT,
    Verdict,
    audit_table,
    conclude,
    edited,
    give_verdicts,
    measure,
)

NAN = float("nan")
RAMP = torch.arange(6, dtype=torch.uint8)[:, None, None, None].expand(6, 32, 32, 3) * 10
CLIPS = [RAMP + 100 * i for i in range(2)]


def smooth_clip():
    """Colors that change slowly over the picture, and a bright square that moves."""
    line = torch.linspace(60, 160, 32)
    clip = torch.stack(
        [line[:, None].expand(32, 32), line.expand(32, 32), line.flip(0).expand(32, 32)], -1
    )
    clip = clip.repeat(6, 1, 1, 1)
    for i, frame in enumerate(clip):
        frame[10:16, 4 * i : 4 * i + 6] = 200
    return clip.byte()


@pytest.mark.parametrize("kind", EDITS)
def test_an_edit_keeps_the_kind_of_clip_and_changes_it(kind):
    clip = smooth_clip()
    once = edited([clip], kind)[0]
    again = edited([clip, clip], kind)
    assert once.shape == clip.shape and once.dtype == torch.uint8
    assert torch.equal(once, again[0]) and not torch.equal(once, clip)


def test_edits_by_hand():
    frames = {
        kind: edited(CLIPS, kind)[0][:, 0, 0, 0].tolist()
        for kind in ("frozen", "reversed", "slowed", "brighter")
    }
    assert frames["frozen"] == [0] * 6 and frames["reversed"] == [50, 40, 30, 20, 10, 0]
    assert frames["slowed"] == [0, 0, 10, 10, 20, 20]
    assert frames["brighter"] == [0, 12, 24, 36, 48, 60]
    spread = (edited(CLIPS, "noisy")[1].float() - CLIPS[1].float()).std() / 255
    assert 0.2 < spread < 0.31  # less than what was added, since pixels end at 0 and 255
    clip = smooth_clip()
    for kind in ("re-encoded", "cropped"):  # nobody would notice
        assert (edited([clip], kind)[0].float() - clip.float()).abs().mean() < 3
    gray = torch.full((2, 8, 8, 3), 90, dtype=torch.uint8)
    color = gray + torch.tensor([20, 0, 10], dtype=torch.uint8)
    assert torch.equal(edited([gray], "saturated")[0], gray)
    # the mean stays, differences grow by half
    assert edited([color], "saturated")[0][0, 0, 0].tolist() == [115, 85, 100]

    def sharpest_edge(clip):
        return (clip[:, :, 1:].float() - clip[:, :, :-1].float()).abs().amax()

    assert sharpest_edge(edited([clip], "blurred")[0]) < 0.6 * sharpest_edge(clip)


class Recorder:
    """Scores the mean of a clip; remembers which prompts came with which kinds of clips."""

    names = ("level",)

    def __init__(self):
        self.prompts = []

    def check(self, prompts):
        pass

    def score(self, clips, prompts, fps):
        self.prompts.append(list(prompts))
        if "fail" in prompts:
            raise OSError("no paper")
        return {"level": torch.stack([clip.double().mean() for clip in clips])}


def test_every_kind_is_measured_with_its_prompts():
    reward = Recorder()
    known = [clip + 1 for clip in CLIPS]
    composite = Composite({"recorder": reward}, None)
    found = measure(composite, CLIPS, ["a", "b"], 8.0, {"slowed": known, "reversed": ()})
    assert list(found) == ["good", "slowed", "reversed", WRONG_PROMPT]
    assert reward.prompts == [["a", "b"]] * 3 + [["b", "a"]]
    assert found["good"]["total"].tolist() == [25, 125]
    assert found["slowed"]["level"].tolist() == [
        26,
        126,
    ]
    assert WRONG_PROMPT not in measure(composite, CLIPS, ["a", "a"], 8.0, {})
    measure(composite, CLIPS * 2, ["a", "a", "b", "b"], 8.0, {})
    assert reward.prompts[-1] == ["b", "b", "a", "a"]
    with pytest.raises(ValueError, match="it fails on good clips: recorder: OSError: no paper"):
        measure(composite, CLIPS, ["a", "fail"], 8.0, {})


@pytest.mark.parametrize(
    ("mean", "half", "fall", "free"),
    [
        (-1.0, 0.5, "falls", "falls"),
        (-1.0, 2.0, "unclear", "unclear"),
        (-0.02, 0.05, "MUST FALL", "same"),  # the fall, if any, is smaller than the noise
        (0.0, 0.0, "MUST FALL", "same"),
        (0.05, 0.04, "MUST FALL", "same"),  # a rise smaller than the noise
        (0.1, 0.05, "MUST FALL", "unclear"),
        (1.0, 0.5, "MUST FALL", "rises"),
        (1.0, 2.0, "unclear", "unclear"),
        (-5.0, NAN, "unclear", "unclear"),  # fewer than three clips
        (NAN, NAN, "unclear", "unclear"),
    ],
)
def test_marks(mean, half, fall, free):
    assert Verdict("VQ", "noisy", Interval(mean, half), 0.1, must_fall=True).mark == fall
    assert Verdict("VQ", "noisy", Interval(mean, half), 0.1, must_fall=False).mark == free
    total = Verdict("total", "noisy", Interval(mean, half), 0.1, must_fall=False).mark
    assert total == ("RISES" if free == "rises" else free)


def scores(good, changes):
    """Scores by kind: `good` by name, and by how much each kind changes them."""
    good = {name: torch.tensor(values, dtype=torch.float64) for name, values in good.items()}
    kinds = {
        kind: {name: good[name] + change.get(name, 0.0) for name in good}
        for kind, change in changes.items()
    }
    return {"good": good} | kinds


VALUES = [0.75, 1.0, 1.25, 1.0]


def test_which_scores_must_fall():
    names = ("total", "videoalign.VQ", "videoalign.MQ", "videoalign.TA", "style")
    found = scores(dict.fromkeys(names, VALUES), {kind: {} for kind in (*EDITS, WRONG_PROMPT)})

    def must(drawn):
        return {
            (v.edit, v.score.removeprefix("videoalign."))
            for v in give_verdicts(found, drawn)
            if v.must_fall
        }

    real = {
        ("noisy", "VQ"),
        ("shaky", "MQ"),
        ("frozen", "MQ"),
        (WRONG_PROMPT, "TA"),
    }
    assert must(drawn=False) == real and must(drawn=True) == real | {("reversed", "TA")}
    assert len(give_verdicts(found, drawn=False)) == len(names) * (len(EDITS) + 1)


def sentences(found):
    return conclude(found, give_verdicts(found, drawn=True))


def test_what_is_wrong_is_named():
    good = {"total": VALUES, "VQ": VALUES}
    told = sentences(
        scores(good, {"frozen": {"total": 2.0}, WRONG_PROMPT: {}, "noisy": {"total": -1.0}})
    )
    assert [text.partition(":")[0] for text in told["wrong"]] == [
        "prefers frozen clips", "VQ does not fall for noisy clips (+0.000 ± 0.000)",
    ]  # fmt: skip
    assert [text.partition(":")[0] for text in told["warnings"]] == ["prompt-blind"]
    told = sentences(scores(good, {"blurred": {"total": 1.0, "VQ": -1.0}, "brighter": {"VQ": 1.0}}))
    assert told["wrong"] == ["total rises for blurred clips (+1.000 ± 0.000)"]
    assert told["weak"] == ["VQ rises for brighter clips (+1.000 ± 0.000)"]
    told = sentences(
        scores({"total": [0.3] * 4, "VQ": [0.3] * 4}, {"noisy": {"total": 1e-9}, WRONG_PROMPT: {}})
    )
    assert len(told["wrong"]) == 1
    assert told["wrong"][0].startswith("constant: every clip gets the same total")
    assert not told["warnings"]


def test_a_total_that_ignores_the_prompt_may_be_meant_so_but_not_one_that_prefers_a_wrong_one():
    for change, wrong, warnings in ((0.0, 0, 1), (2.0, 1, 0), (-2.0, 0, 0)):
        told = sentences(scores({"total": VALUES}, {WRONG_PROMPT: {"total": change}}))
        assert (len(told["wrong"]), len(told["warnings"])) == (wrong, warnings)
    told = sentences(scores({"total": VALUES, "TA": VALUES}, {WRONG_PROMPT: {"total": -2.0}}))
    assert [text.partition(" (")[0] for text in told["wrong"]] == [
        "TA does not fall for wrong prompt clips"
    ]


@pytest.mark.parametrize(
    ("noisy", "frozen", "is_flipped"),
    [(2.0, 2.0, True), (2.0, -2.0, False), (2.0, 0.0, False), (-2.0, -2.0, False)],
)
def test_a_reward_with_the_wrong_sign_is_named(noisy, frozen, is_flipped):
    """A legitimate reward may like some damage, but not several kinds of it and dislike none."""
    found = scores({"total": VALUES}, {"noisy": {"total": noisy}, "frozen": {"total": frozen}})
    assert (FLIPPED in sentences(found)["wrong"]) == is_flipped


@pytest.mark.parametrize(
    ("names", "changes", "wrong", "warned"),
    [
        (["motion"], {"noisy": 2.0, "frozen": -2.0}, 0, ["noisy"]),
        (["calm"], {"noisy": -2.0, "frozen": 2.0}, 0, ["frozen"]),
        (["pickscore"], {"frozen": 2.0, WRONG_PROMPT: -2.0}, 0, ["frozen"]),
        # a score that claims to judge what was damaged
        (["motion", "VQ"], {"noisy": 2.0, "frozen": -2.0}, 2, []),
        (["calm", "MQ"], {"noisy": -2.0, "frozen": 2.0}, 2, []),
        # a wrong sign, and wrong prompts, which only a reward that reads them can prefer
        (["motion"], {"noisy": 2.0, "frozen": 2.0}, 3, []),
        (["style"], {WRONG_PROMPT: 2.0}, 1, []),
    ],
)
def test_a_part_of_a_reward_may_pay_for_damage_that_it_is_not_about(names, changes, wrong, warned):
    found = scores(
        dict.fromkeys(["total", *names], VALUES),
        {kind: dict.fromkeys(["total", *names], change) for kind, change in changes.items()},
    )
    verdicts = give_verdicts(found, drawn=True)
    told = conclude(found, verdicts, as_part=True)
    assert len(told["wrong"]) == wrong
    assert [text.split()[4] for text in told["warnings"]] == warned
    assert conclude(found, verdicts)["wrong"]  # alone, none of them is fit


def test_what_is_not_noticed_is_weak():
    spread = torch.tensor(VALUES, dtype=torch.float64).std(correction=0).item()
    for change, weak in (
        (0.0, "does not notice"),
        (-0.9 * spread, "hardly notices"),
        (-1.1 * spread, None),
    ):
        told = sentences(
            scores({"total": VALUES, "VQ": VALUES}, {"blurred": {"VQ": change, "total": -9.0}})
        )
        assert [text.partition(" blurred")[0] for text in told["weak"]] == ([weak] if weak else [])
        assert not told["wrong"] and not told["unclear"]


def test_two_clips_decide_nothing():
    found = scores({"total": [0.9, 1.1], "VQ": [0.9, 1.1]}, {"noisy": {"VQ": 3.0, "total": 3.0}})
    told = sentences(found)
    assert not told["wrong"] and told["unclear"] == ["total of noisy clips", "VQ of noisy clips"]
    shown = audit_table(found, give_verdicts(found, drawn=True)).splitlines()
    assert shown[0].split() == ["2", "clips", "total", "VQ"] and "+3.000 ± – unclear" in shown[2]
