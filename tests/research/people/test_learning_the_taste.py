"""Can the embedded reward's heads learn the raters' taste from 200 answers? In memory, without page and files."""

import random
from functools import partial
from itertools import combinations

import pytest
import torch

from research.people.demo import FPS, MODEL, NOISE, OLD_REWARD, STEPS
from research.people.taste import TIE, open_prompts, ordered_rightly, taste
from research.tiny.quality import sample_clips
from sage_grpo.algo.sde import build_schedule, flow_sigmas
from sage_grpo.models.registry import open_backbone
from sage_grpo.rewards.videoalign.reward import VideoAlign
from sage_grpo.tools.prefer.heads import (
    Comparisons,
    choose_strength,
    fit_heads,
    full_head,
    raw_scores,
)

STUDY_PROMPTS = slice(0, 10)
NEW_PROMPTS = slice(30, 34)
GROUP = 7  # clips of a prompt, so 210 pairs


def material(prompts, seed):
    """Hidden states (N, 3, D) of sampled clips, and how much the raters like them (N,)."""
    backbone = open_backbone(MODEL, torch.device("cpu"))
    schedule = build_schedule("ode", flow_sigmas(STEPS, backbone.sampling.shift), 0.0)
    clips = torch.cat(list(sample_clips(backbone, schedule, prompts, GROUP, 1.0, seed)))
    repeated = [prompt for prompt in prompts for _ in range(GROUP)]
    reward = VideoAlign(OLD_REWARD)
    parts = []
    for start in range(0, len(clips), 32):
        rows = slice(start, start + 32)
        inputs = reward.inputs(list(clips[rows]), repeated[rows], FPS)
        parts.append(reward.hidden(inputs))
    return torch.cat(parts), taste(clips)


def answers(liked, prompts, seed):
    """All pairs of a prompt, answered by a rater with the taste, some by accident."""
    rng = random.Random(seed)
    rows = []
    for number, prompt in enumerate(prompts):
        for i, j in combinations(range(GROUP), 2):
            first, second = GROUP * number + i, GROUP * number + j
            difference = (liked[first] - liked[second]).item()
            label = 0.0 if abs(difference) < TIE else (1.0 if difference > 0 else -1.0)
            if rng.random() < NOISE:
                label = rng.choice([1.0, -1.0, 0.0])
            rows.append((first, second, label, prompt))
    first, second, labels, names = zip(*rows, strict=True)
    shares = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64).expand(len(rows), 3)
    integers = partial(torch.tensor, dtype=torch.long)
    return Comparisons(
        first=integers(first),
        second=integers(second),
        shares=shares,
        labels=torch.tensor(labels, dtype=torch.float64),
        prompts=names,
        questions=("vq",) * len(rows),
    )


@pytest.mark.slow
@torch.no_grad()
def test_heads_learn_the_taste_from_two_hundred_answers():
    """Slow: 98 clips are sampled and read by the oracle. The fast test of the fit has a taste made of its features."""
    prompts = open_prompts(seed=0)
    study_prompts = prompts[STUDY_PROMPTS]
    hidden, liked = material(study_prompts, seed=0)
    comparisons = answers(liked, study_prompts, seed=0)
    head = full_head(VideoAlign(OLD_REWARD).head).double()
    with torch.enable_grad():
        losses = choose_strength(hidden, head, comparisons, seed=0)
        new_head = fit_heads(hidden, head, comparisons, min(losses, key=losses.get))

    new_prompts = prompts[NEW_PROMPTS]
    new_hidden, new_liked = material(new_prompts, seed=77)
    accuracy = {}
    for name, vectors in {"before": head, "after": new_head}.items():
        scores = raw_scores(new_hidden.double(), vectors)[:, 0].tolist()
        right = [value for _, value in ordered_rightly(scores, new_liked.tolist(), GROUP)]
        accuracy[name] = sum(right) / len(right)
    assert accuracy["before"] < 0.78  # 0.67 of 33 pairs
    assert accuracy["after"] > 0.88  # 0.94
