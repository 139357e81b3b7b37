"""VideoAlign against the published code, part by part, so that a failure says where; then what training relies on."""

import json
from pathlib import Path

import pytest
import torch

from sage_grpo.rewards.base import Composite
from sage_grpo.rewards.videoalign import folder as videoalign_folder
from sage_grpo.rewards.videoalign.reward import VideoAlign

FIXTURES = Path(__file__).parents[2] / "fixtures" / "videoalign"
RUNS = json.loads((FIXTURES / "upstream_scores.json").read_text())["runs"]
OVERRIDES = {"fps": "sample_fps", "max_pixels": "max_pixels", "num_frames": "num_frames"}


@pytest.fixture(scope="module")
def reward(videoalign_folders):
    return VideoAlign(videoalign_folders["VideoReward"])


def columns(samples):
    """Clips, prompts and frame rates."""
    clips = [sample.clip for sample in samples]
    prompts = [sample.prompt for sample in samples]
    return clips, prompts, [sample.fps for sample in samples]


def score(reward, samples, **options):
    """(B, 3)"""
    scores = reward.score(*columns(samples), **options)
    return torch.stack([scores[name] for name in ("VQ", "MQ", "TA")], 1)


@pytest.fixture(scope="module")
def inputs(reward, samples):
    return reward.inputs(*columns(samples))


def test_tokens_are_those_of_the_published_code(reward, inputs, upstream):
    tokens = inputs["input_ids"]
    assert torch.equal(tokens, upstream["input_ids"].long())
    places = [
        [row.index(token) for token in reward.reward_tokens.tolist()] for row in tokens.tolist()
    ]
    assert places == upstream["reward_positions"].tolist()
    assert torch.equal(inputs["video_grid_thw"], upstream["video_grid_thw"])


@torch.no_grad()
def test_vision_features_and_hidden_states_are_those_of_the_published_code(
    reward, inputs, upstream
):
    seen = reward.model.get_video_features(inputs["pixel_values_videos"], inputs["video_grid_thw"])
    features = torch.cat(seen.pooler_output)
    torch.testing.assert_close(
        features[upstream["vision_rows_index"]], upstream["vision_rows"], atol=1e-4, rtol=0
    )
    torch.testing.assert_close(features.sum(1), upstream["vision_row_sum"], atol=1e-3, rtol=0)
    torch.testing.assert_close(reward.hidden(inputs), upstream["reward_hidden"], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "run", RUNS, ids=lambda r: f"{r['checkpoint']}-{r['mode']}-{r['use_norm']}-{r['overrides']}"
)
def test_scores_are_those_of_the_published_code(videoalign_folders, samples, run):
    options = {OVERRIDES[name]: value for name, value in run["overrides"].items()}
    reward = VideoAlign(videoalign_folders[run["checkpoint"]])
    vars(reward).update(options)
    chosen = [samples[i] for i in run["samples"]]
    batches = [chosen] if run["mode"] == "batch" else [[sample] for sample in chosen]
    scores = torch.cat([score(reward, batch, normalize=run["use_norm"]) for batch in batches])
    expected = torch.tensor([[row[name] for name in ("VQ", "MQ", "TA")] for row in run["scores"]])
    torch.testing.assert_close(scores, expected, atol=1e-4, rtol=0)


def test_a_score_does_not_depend_on_company_or_order(reward, samples):
    """Sizes, lengths and prompt lengths all differ."""
    alone = torch.cat([score(reward, [sample]) for sample in samples])
    order = [3, 0, 4, 1, 2]
    together = score(reward, [samples[i] for i in order])
    torch.testing.assert_close(together, alone[order], atol=1e-4, rtol=0)
    twice = score(reward, [samples[0], samples[1], samples[0]])
    torch.testing.assert_close(twice[0], twice[2], atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["of one size", "of several sizes"])
def test_frames_of_one_size_share_an_attention_call_with_the_result_of_single_calls(
    reward, samples, monkeypatch, kind
):
    if kind == "of one size":
        samples = samples[:1] * 3
    calls = []
    plain = videoalign_folder.scaled_dot_product_attention

    def counted(*args, **kwargs):
        calls.append(args)
        return plain(*args, **kwargs)

    monkeypatch.setattr(videoalign_folder, "scaled_dot_product_attention", counted)
    scores = score(reward, samples)
    layers = len(reward.model.visual.blocks)
    assert (len(calls) == layers) == (kind == "of one size")
    monkeypatch.setattr(reward.model.visual.config, "_attn_implementation", "sdpa")
    torch.testing.assert_close(scores, score(reward, samples), rtol=0, atol=1e-6)


def test_only_text_alignment_sees_the_prompt(reward, samples):
    clip = samples[0].clip
    scores = reward.score([clip, clip], ["a boat", "a boat on a very wide lake"], 8.0)
    assert scores["VQ"][0] == pytest.approx(scores["VQ"][1].item(), abs=1e-4)
    assert scores["MQ"][0] == pytest.approx(scores["MQ"][1].item(), abs=1e-4)
    assert abs(scores["TA"][0] - scores["TA"][1]) > 0.01


def test_a_picture_scores_like_a_clip_that_stands_still(reward, samples):
    clip, prompt = samples[0].clip[:1], samples[0].prompt
    picture = reward.score([clip], [prompt], 8.0)
    still = reward.score([clip.expand(2, -1, -1, -1)], [prompt], 8.0)
    for name in reward.names:
        torch.testing.assert_close(picture[name], still[name])


def test_the_rate_of_the_clip_decides_what_is_seen(reward, samples):
    def sampled_pairs(fps):
        return reward.inputs([samples[1].clip], ["p"], fps)["video_grid_thw"][0, 0].item()

    assert (sampled_pairs(8.0), sampled_pairs(16)) == (10, 5)


def test_a_folder_without_statistics_has_raw_scores(videoalign_folders, samples):
    reward = VideoAlign(videoalign_folders["VideoReward_split"])
    assert torch.equal(score(reward, samples[:1]), score(reward, samples[:1], normalize=False))


@pytest.mark.parametrize("token", ["<|video_pad|>", "<|TA_reward|>", "<|im_end|>"])
def test_a_prompt_with_a_reserved_token_is_refused(reward, samples, token):
    with pytest.raises(ValueError, match=r"which the reward reserves"):
        reward.check([f"a boat {token}"])
    with pytest.raises(ValueError, match=r"which the reward reserves"):
        reward.score([samples[0].clip], [f"a boat {token}"], 8.0)
    reward.check(["a <boat> {with} | braces", ""])


def test_half_precision_rounds_the_rotary_frequencies_as_published(
    videoalign_folders, samples, reward
):
    half = VideoAlign(videoalign_folders["VideoReward"], dtype=torch.bfloat16)
    frequencies = half.model.language_model.rotary_emb.inv_freq
    exact = reward.model.language_model.rotary_emb.inv_freq
    assert torch.equal(frequencies.float(), exact.bfloat16().float())
    assert not torch.equal(frequencies.float(), exact)

    # cosines and sines that the first block of the vision model is given
    embeddings = []
    half.model.visual.blocks[0].register_forward_pre_hook(
        lambda _, args, kwargs: embeddings.append(kwargs["position_embeddings"]), with_kwargs=True
    )
    assert (score(half, samples[:1]) - score(reward, samples[:1])).abs().max() < 0.5
    cosines, sines = embeddings[0]

    # the same by hand; patches come in blocks of 2 x 2
    inputs = half.inputs([samples[0].clip], ["p"], samples[0].fps)
    frames, height, width = inputs["video_grid_thw"][0].tolist()
    blocks = [(y, x) for y in range(0, height, 2) for x in range(0, width, 2)]
    places = [(y + dy, x + dx) for y, x in blocks for dy in (0, 1) for dx in (0, 1)]
    rounded = reward.model.visual.rotary_pos_emb.inv_freq.bfloat16()
    table = torch.outer(torch.arange(max(height, width), dtype=torch.bfloat16), rounded)
    angles = table[torch.tensor(places * frames)].flatten(1)
    assert torch.equal(cosines.float(), torch.cat([angles.cos()] * 2, 1).float())
    assert torch.equal(sines.float(), torch.cat([angles.sin()] * 2, 1).float())


def test_numbers_that_break_later_never_train(videoalign_folders, samples):
    reward = VideoAlign(videoalign_folders["VideoReward"])
    with torch.no_grad():
        reward.model.language_model.norm.weight[0] = torch.nan
    scores = Composite({"videoalign": reward}, {"VQ": 1.0}).score([samples[0].clip], ["p"], 8.0)
    assert scores.total.isnan().all()
    assert scores.errors == ["1 score(s) are not finite"]
