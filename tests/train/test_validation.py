"""Validation: fixed noise, correct statistics, and all of its flags."""

import dataclasses
import json
import math
from contextlib import contextmanager

import imageio.v2 as imageio
import pytest
import torch

from sage_grpo.algo.solver import ode_tables
from sage_grpo.models.backbone import Sampling
from sage_grpo.models.sample import counter_noise
from sage_grpo.train.clips import gold_metrics
from sage_grpo.train.validation import summary
from tests.smallest_run import on_tiny

# imageio's reader leaves the pipes of its ffmpeg process to the garbage collector
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")


def test_the_same_weights_give_the_same_clips_and_the_seed_decides(make, tmp_path):
    trainer = make()
    clips = [trainer.validation.sample(trainer.validation.requests[0]) for _ in range(2)]
    assert torch.equal(*clips)
    for change in ({"validation_global_seed": 7}, {"guidance_scale": 3.0}):
        other = make(overwrite=True, **change)
        assert not torch.equal(clips[0], other.validation.sample(other.validation.requests[0]))


def test_every_prompt_has_its_own_noise(make):
    validation = make().validation
    first = validation.requests[0]
    clips = [validation.sample(prompt) for prompt in (first, dataclasses.replace(first, index=1))]
    assert not torch.equal(*clips)


def test_its_flags_take_effect(make, tmp_path, flags):
    prompts = tmp_path / "valid.csv"
    prompts.write_text("prompt,index,seed\na red circle moving left,4,11\n")
    trainer = make(
        validation_prompts=str(prompts),
        validate_video_length=9,
        validation_fixed_size="32x64",
        validation_num_inference_steps=3,
        validation_timestep_shift=2.0,
        holdout_reward="shapes",
        validation_interval=1,
        validation_videos=1,
        max_steps=1,
    )
    torch.testing.assert_close(
        trainer.validation.sigmas.float(), torch.tensor([1.0, 0.8, 0.5, 0.0])
    )
    trainer.train()
    folder = trainer.run.path / "validation" / "step-000001"
    (record,) = json.loads((folder / "clips.json").read_text())
    assert (record["height"], record["width"]) == (32, 64)
    assert (
        record["seed"] == 11
        and record["file"].startswith("0004-")
        and record["file"].endswith("-11.mp4")
    )
    assert record["holdout"]["VQ"] == record["scores"]["VQ"]
    with imageio.get_reader(folder / record["file"]) as reader:
        frames = list(reader.iter_data())
    assert len(frames) == 9 and frames[0].shape[:2] == (256, 512)  # magnified for players


@on_tiny
def test_the_defaults_are_those_of_the_model_whatever_the_rollout_does(make, flags):
    for name in [
        name
        for name in flags
        if name.startswith(("validation_", "validate_")) and name != "validation_prompts"
    ]:
        del flags[name]
    trainer = make(timestep_shift=3.0, num_validation_prompts=2)
    assert trainer.validation.sampling == Sampling(
        9, 32, 32, fps=8, shift=5.0, guidance=1.0, num_steps=20
    )
    assert trainer.validation.shape == trainer.backbone.latent_shape(9, 32, 32)
    assert len(trainer.validation.sigmas) == 21 and len(trainer.validation.requests) == 2


@on_tiny
def test_a_clip_with_broken_pixels_is_missing_and_the_others_are_not(make, tmp_path):
    trainer, calls = make(validation_videos=3), []

    def break_second(module, inputs, pixels):
        calls.append(1)
        return pixels * math.nan if len(calls) == 2 else pixels

    trainer.backbone.vae.decoder.register_forward_hook(break_second)
    result = trainer.validation.run(tmp_path / "clips")
    records = json.loads((tmp_path / "clips" / "clips.json").read_text())
    assert [record["scores"]["total"] is None for record in records] == [False, True, False]
    assert [(tmp_path / "clips" / record["file"]).is_file() for record in records] == [
        True,
        False,
        True,
    ]
    assert (
        result["reward/failed"] == 1
        and result["count"] == 3
        and math.isfinite(result["reward/total"])
    )


@pytest.mark.parametrize("count, kept", [(None, 3), (2, 2), (0, 0)])
def test_some_clips_are_kept_as_videos_and_all_are_judged(make, tmp_path, count, kept):
    validation = make(validation_videos=count).validation
    assert validation.run(tmp_path / "clips")["count"] == 3
    files = [
        record["file"] for record in json.loads((tmp_path / "clips" / "clips.json").read_text())
    ]
    assert [file.name for file in sorted((tmp_path / "clips").glob("*.mp4"))] == files[
        :kept
    ] and len(files) == 3


def test_the_bar_shows_every_stage_and_each_batch_that_is_scored(make, tmp_path, capfd):
    trainer = make(reward_batch_size=1, holdout_reward="shapes")
    before = trainer.reward.on_batch
    capfd.readouterr()
    trainer.validation.run(tmp_path / "validation")
    shown = capfd.readouterr().err
    places = [
        shown.index(f"validation: {stage}")
        for stage in ("sampling", "decoding", "scoring", "writing")
    ]
    assert places == sorted(places)
    clips = len(trainer.validation.requests)
    assert (
        f"0/{5 * clips} " in shown
    )  # the reward, the hold-out, and the reward again: together and twice alone
    assert trainer.reward.on_batch is before


def test_a_run_can_be_stopped_at_every_denoising_step_and_clip(make, tmp_path):
    """A full-size clip takes minutes, more than a scheduler waits after its signal."""
    validation, calls = make().validation, []
    validation.run(tmp_path / "clips", lambda: calls.append(1))
    assert len(calls) == 3 * (2 + 1)  # three clips of two steps


def test_weights_are_not_gathered_while_clips_are_decoded(make, monkeypatch, tmp_path):
    """Both at once do not fit on an 80 GB card at full size."""
    validation, seen = make().validation, []

    @contextmanager
    def keep_unsharded():
        seen.append("unsharded")
        yield
        seen.append("freed")

    for name in ("latents", "decode"):
        plain = getattr(validation, name)
        monkeypatch.setattr(
            validation, name, lambda *words, n=name, f=plain: seen.append(n) or f(*words)
        )
    validation.run(tmp_path / "clips", keep_unsharded=keep_unsharded)
    assert seen == ["unsharded", *["latents"] * 3, "freed", *["decode"] * 3]


def test_summary_is_over_what_has_a_value():
    records = [{"scores": {"total": v, "VQ": 1.0}, "holdout": {}, "gold": {"match": m}} for v, m in
               ((1.0, 1), (3.0, 0), (None, None))]  # fmt: skip
    result = summary(records)
    assert result["reward/total"] == 2 and result["reward/total_stderr"] == pytest.approx(1.0)
    assert result["gold/match"] == 0.5 and result["reward/failed"] == 1 and result["count"] == 3
    assert math.isnan(summary(records[2:])["reward/total"])
    lost = {
        "scores": {"total": None, "VQ": None},
        "holdout": {},
        "gold": {},
    }  # of a rank that made no clip
    assert summary([lost, *records])["gold/match"] == 0.5


def test_gold_of_a_missing_clip_is_nan():
    clip = torch.zeros(5, 4, 4, 3, dtype=torch.uint8)
    found = gold_metrics(
        lambda clips, prompts: {"match": torch.ones(len(clips)).double()}, [clip, None], ["a", "b"]
    )
    assert found["match"][0] == 1 and found["match"][1].isnan()
    assert gold_metrics(None, [clip], ["a"]) == {}


def test_a_size_that_is_none_is_refused(make):
    for text in ("big", "32", "32x", "x32", "-32x32"):
        with pytest.raises(ValueError, match="validation_fixed_size"):
            make(validation_fixed_size=text, overwrite=True)


def test_validation_may_use_the_second_order_solver(make):
    """Its clips are those of the solver's tables, computed here step by step."""
    trainer = make(validation_solver="dpm", validation_num_inference_steps=4)
    validation, prompt = trainer.validation, trainer.validation.requests[0]
    (cond,), sigmas = trainer.backbone.encode([prompt]), validation.sigmas.float()
    tables = ode_tables(validation.sigmas, "dpm")
    delta, factor = tables.delta.float(), tables.history[:, 0].float()
    x, before = (
        counter_noise(validation.shape, validation.seed(prompt), [0], prompt=prompt.index)[0],
        0.0,
    )
    with torch.no_grad():
        for i in range(4):
            velocity = trainer.backbone.velocity(x, sigmas[i].expand(1), cond, trainer.guidance)
            clean = x - sigmas[i] * velocity
            x, before = x - delta[i] * velocity + factor[i] * (clean - before), clean
    torch.testing.assert_close(validation.latents([prompt]), x)
    assert factor.abs().max() > 0.05
    trainer.run.close()


def test_joined_prompts_are_sampled_as_each_alone(make, flags, tmp_path):
    """Three of the four texts are equally long; one clip is not finite and must not cost the others theirs."""
    texts = (
        "a red circle moving left",
        "a green square moving right",
        "a red square moving right",
        "a red circle",
    )
    (tmp_path / "four.txt").write_text("\n".join(texts) + "\n")
    found = []
    for together in (1, 2):
        trainer = make(
            prompts_per_forward=together,
            validation_prompts=str(tmp_path / "four.txt"),
            overwrite=True,
        )
        validation, sizes = trainer.validation, []
        trainer.backbone.transformer.register_forward_pre_hook(
            lambda _, inputs, sizes=sizes: sizes.append(len(inputs[0]))
        )
        validation.run(tmp_path / f"by_{together}")
        listing = json.loads((tmp_path / f"by_{together}" / "clips.json").read_text())
        found.append(({clip["file"]: clip["scores"]["total"] for clip in listing}, list(sizes)))
        x = torch.cat([validation.latents([prompt]) for prompt in validation.requests[:3]])
        x[1] = torch.nan
        assert [clip is None for clip in validation.decode(x)] == [False, True, False]
        trainer.run.close()
    (alone, ones), (joined, twos) = found
    assert list(joined) == list(alone) and len(joined) == 4
    assert joined == pytest.approx(alone, abs=1e-3)  # of uint8 clips
    assert (
        set(ones) == {1}
        and len(ones) == 4 * flags["validation_num_inference_steps"]
        and max(twos) == 2
    )
    assert sum(twos) == sum(ones)
