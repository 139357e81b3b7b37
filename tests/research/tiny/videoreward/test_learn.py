"""The embedded reward: trained in the published classes, written in the published format, read by VideoAlign."""

import json

import pytest
import torch

from research.tiny.videoreward import learn, pool
from sage_grpo.rewards.base import Setup
from sage_grpo.rewards.videoalign import training
from sage_grpo.rewards.videoalign.folder import check_folder
from sage_grpo.rewards.videoalign.reward import VideoAlign, build

FEW = "--clips 16 --sampled 16 --pairs 32 --caption_steps 2 --steps 2 --batch 4 --device cpu"
GRID = (4, 4, 4)  # of 8 frames of 56 x 56
PROMPTS = [
    "a small red circle moving left",
    'a large cyan letter "T" moving up fast on a white background',
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Judge and folder after a few steps; few samplers and few damages, for speed."""
    folder, kept = tmp_path_factory.mktemp("reward") / "VideoReward", []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "SAMPLERS", pool.SAMPLERS[:1])
        patch.setattr(learn, "HELD_PAIRS", 16)
        patch.setattr(learn, "HELD_CLIPS", 16)
        plain = learn.train
        patch.setattr(
            learn, "train", lambda judge, *rest: kept.append(judge) or plain(judge, *rest)
        )
        learn.main(["--output", str(folder), *FEW.split()])
    return kept[0], folder


def clips(count=2, side=32):
    return torch.randint(
        0,
        256,
        (count, 9, side, side, 3),
        dtype=torch.uint8,
        generator=torch.Generator().manual_seed(0),
    )


class Slope(torch.nn.Module):
    """The least that can be trained."""

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Parameter(torch.ones(1))


def test_it_is_trained_by_the_loop_of_the_package(monkeypatch):
    """The loop in which `prefer learn` trains an adapter (tests/tools/prefer/test_lora.py)."""
    names = []
    loop = training.train

    def counted(*args, **kwargs):
        names.append(kwargs["name"])
        loop(*args, **kwargs)

    monkeypatch.setattr(training, "train", counted)
    slope = Slope()
    watched = []
    learn.optimize(
        slope,
        3,
        0.1,
        draw=lambda: (torch.ones(4),),
        loss_of=lambda x: (slope.head * x).square().mean(),
        name="pairs",
        watch=lambda: watched.append(1) or "",
        every=2,
    )
    assert names == ["pairs"]
    assert slope.head < 1 and len(watched) == 2


@pytest.mark.slow
def test_the_folder_is_complete_and_videoalign_gives_the_scores_of_training(trained):
    """Slow: a run of the whole program."""
    judge, folder = trained
    check_folder(folder)
    reward = VideoAlign(folder)
    found = torch.stack(
        list(reward.score(list(clips()), PROMPTS, 8.0, normalize=False).values()), 1
    )
    tokens = learn.Texts(judge.reward, PROMPTS, GRID, torch.device("cpu"))[torch.arange(2)]
    patches = judge.reward._patches(clips(), 8.0)[0]
    with torch.no_grad():
        mine = judge.scores(tokens, judge(tokens, patches))
    torch.testing.assert_close(found, mine, atol=2e-3, rtol=2e-3)  # stored in half precision
    assert (
        json.loads((folder / "model_config.json").read_text())["data_config"]["min_frame_pixels"]
        == 56 * 56
    )


def test_scores_are_z_scores_of_what_was_held_out(tmp_path):
    (tmp_path / "model_config.json").write_text('{"data_config": {"fps": 2.0}}')
    scores = torch.tensor([[1.0, 2.0, 30.0], [3.0, 2.5, 10.0]])
    learn.write_scale(tmp_path, scores)
    found = json.loads((tmp_path / "model_config.json").read_text())
    assert found["data_config"] == {"fps": 2.0} and found["inference_config"]["TA_mean"] == 20
    assert found["inference_config"]["VQ_std"] == pytest.approx(2**0.5)


@pytest.mark.slow
def test_only_alignment_depends_on_the_prompt(trained):
    """Slow: a run of the whole program."""
    reward = VideoAlign(trained[1])
    one, other = (reward.score(list(clips(1)), [prompt], 8.0) for prompt in PROMPTS)
    assert one["VQ"] == other["VQ"] and one["MQ"] == other["MQ"] and one["TA"] != other["TA"]


@pytest.mark.slow
def test_patches_of_many_clips_are_those_of_each(trained):
    """Slow: a run of the whole program."""
    judge, _ = trained
    many = pool.Pool(clips(3), *(torch.zeros(3),) * 2, torch.zeros(3, 6), torch.zeros(3))
    found, grid = judge.patches(many, 8.0)
    for rows, clip in zip(found, clips(3), strict=True):
        wanted, wanted_grid = judge.reward._patches(clip[None], 8.0)
        assert grid == wanted_grid
        torch.testing.assert_close(rows.float(), wanted[0], atol=2e-3, rtol=0)


@pytest.mark.slow
def test_attention_within_frames_is_that_of_the_stock_model(trained):
    """Slow: a run of the whole program."""
    judge, folder = trained
    stock = VideoAlign(folder)
    stock.model.load_state_dict(judge.model.state_dict())
    inputs = stock.inputs(list(clips()), PROMPTS, 8.0)
    patches, grids = inputs["pixel_values_videos"], inputs["video_grid_thw"]
    ours, theirs = (
        model.visual(patches, grid_thw=grids).pooler_output for model in (judge.model, stock.model)
    )
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_captions_are_learned_from_the_tokens_of_the_prompt_alone(trained):
    """Slow: a run of the whole program."""
    judge, _ = trained
    tokens = learn.Texts(judge.reward, PROMPTS, GRID, torch.device("cpu"))[torch.arange(2)]
    hidden = torch.zeros(*tokens.shape, judge.head.shape[1], requires_grad=True)
    learn.caption_loss(judge, tokens, hidden).backward()
    used = hidden.grad.abs().sum(-1) > 0
    for row, prompt in zip(range(2), PROMPTS, strict=True):
        text = judge.reward.tokenizer.decode(tokens[row, 1:][used[row, :-1]])
        assert prompt in text and "Motion" not in text and "Picture" not in text


@pytest.mark.slow
def test_the_number_of_frames_that_the_folder_fixes_beats_the_rate_of_a_run(trained):
    """Slow: a run of the whole program."""
    reward = build(Setup(trained[1], torch.device("cpu"), sample_fps=2.0))
    assert reward._patches(clips(1), 8.0)[1] == GRID
