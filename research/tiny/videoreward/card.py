"""How well does the embedded reward judge? Recomputes the figures of its card from clips that it never saw.

    python -m research.tiny.videoreward.card     minutes on 2 cores; writes README.md and card.json into its folder

Pairs of held-out clips, ordered by the reward and by the oracle without an annotator's errors; prompts with one word
replaced; and clips damaged in known ways. All scores come from `VideoAlign.score`, as in training.
"""

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from research.tiny.videoreward.pairs import ERROR, SCORES, TIE, Pairs, accuracy, draw_pairs
from research.tiny.videoreward.pool import SOURCES, STRONGEST, Pool, build_pool
from sage_grpo.models.registry import open_backbone
from sage_grpo.rewards.videoalign.reward import VideoAlign
from sage_grpo.worlds.shapes.damage import DAMAGES
from sage_grpo.worlds.shapes.scenes import ATTRIBUTES, captions, render, sample_scenes, sentence
from sage_grpo.worlds.shapes.world import as_uint8

LEAST = 0.05  # pairs that differ by less have no better clip
SEED = 1000  # of the clips; training uses others
BATCH = 64
WEIGHTS = {"VQ": 0.5, "MQ": 0.5, "TA": 1.0}  # the default of `reward_weights`


def score(reward: VideoAlign, clips: Tensor, prompts: Sequence[str], fps: float) -> Tensor:
    """z-scores (N, 3)."""
    parts = []
    for start in tqdm(range(0, len(clips), BATCH), "reward", unit="batch", leave=False):
        batch = slice(start, start + BATCH)
        scores = reward.score(list(clips[batch]), prompts[batch], fps)
        parts.append(torch.stack([scores[name] for name in SCORES], 1))
    return torch.cat(parts)


def pair_accuracy(
    reward: VideoAlign, pool: Pool, pairs: Pairs, fps: float
) -> dict[str, dict[str, float | None]]:
    """Share of the pairs ordered as the oracle orders them: all, by source, and what annotators themselves reach.

    None where no pairs differ: rendered clips all move perfectly.
    """
    prompts = [prompt for prompt in pairs.prompts for _ in range(2)]  # one for each clip
    scores = score(reward, pool.clips[pairs.clips.flatten()], prompts, fps)
    difference = scores[::2] - scores[1::2]

    source = pool.source.cpu()[pairs.clips]
    groups = {"all": torch.ones(len(source), dtype=torch.bool)}
    for i, name in enumerate(SOURCES):
        groups[f"both {name}"] = (source == i).all(1)
    groups["of two sources"] = source[:, 0] != source[:, 1]

    rows: dict[str, dict[str, float | None]] = {}
    for name, chosen in groups.items():
        rows[name] = {}
        for i, kind in enumerate(SCORES):
            share = accuracy(difference[chosen, i], pairs.truth[chosen, i], LEAST)
            rows[name][kind] = None if math.isnan(share) else share
        rows[name]["pairs"] = int(chosen.sum())
    rows["annotators"] = agreement(pairs)
    return rows


def agreement(pairs: Pairs) -> dict[str, float]:
    """Share of the annotators' labels that agree with the truth, among those that are no ties."""
    shares = {}
    for i, kind in enumerate(SCORES):
        decided = pairs.labels[:, i] != 0
        shares[kind] = accuracy(pairs.labels[decided, i], pairs.truth[decided, i], LEAST)
    return shares | {"pairs": len(pairs.prompts)}


def word_accuracy(reward: VideoAlign, pool: Pool, fps: float, count: int) -> dict[str, float]:
    """By attribute: how often TA prefers what a clip shows to the same prompt with this one word replaced."""
    generator = torch.Generator().manual_seed(SEED)
    chosen = torch.randperm(len(pool.clips), generator=generator)[:count]
    clips = pool.clips.cpu()[chosen]
    shown = pool.attributes.cpu()[chosen]
    right = score(reward, clips, _sentences(shown), fps)[:, 2]  # TA
    shares = {}
    for column, (name, words) in enumerate(ATTRIBUTES.items()):
        classes = shown.clone()
        classes[:, column] += torch.randint(1, len(words), (len(shown),), generator=generator)
        classes[:, column] %= len(words)
        wrong = score(reward, clips, _sentences(classes), fps)[:, 2]
        shares[name] = (wrong < right).double().mean().item()
    return shares


def _sentences(classes: Tensor) -> list[str]:
    """Prompts that name these classes (N, 6)."""
    sentences = []
    for row in classes.tolist():
        named = zip(ATTRIBUTES.items(), row, strict=True)
        sentences.append(sentence({name: words[i] for (name, words), i in named}))
    return sentences


def damage_effects(
    reward: VideoAlign, size: tuple[int, int, int], fps: float, count: int
) -> dict[str, dict[str, float]]:
    """By damage at half its strongest: mean change of each score, and the share of clips whose weighted sum rises."""
    scenes = sample_scenes(count, torch.Generator().manual_seed(SEED))
    clips = render(scenes, *size)
    prompts = captions(scenes)
    before = score(reward, as_uint8(clips), prompts, fps)
    weights = torch.tensor([WEIGHTS[name] for name in SCORES])
    effects = {}
    for name, damage in DAMAGES.items():
        damaged = damage(clips, STRONGEST[name] / 2, torch.Generator().manual_seed(SEED))
        change = score(reward, as_uint8(damaged), prompts, fps) - before
        means = {kind: change[:, i].mean().item() for i, kind in enumerate(SCORES)}
        effects[name] = means | {"fooled": ((change @ weights) > 0).double().mean().item()}
    return effects


CARD = """# A tiny VideoAlign that learned to judge moving shapes

A Qwen2-VL of {parameters:.1f} M parameters in the folder format of VideoAlign, read by the class that reads the
published weights. It was trained by `research/tiny/videoreward/learn.py` on pairs of clips, with VideoAlign's kind of
loss (Bradley-Terry with ties) and labels of simulated annotators: the oracle's judgement with an error of {error} and
ties below {tie} (VQ, MQ, TA). Like any learned reward it is a proxy, and errs.

    {command}

## Accuracy

Pairs of clips that it never saw, ordered as the oracle orders them without an annotator's error; pairs that differ by
less than {least} are left out. `python -m research.tiny.videoreward.card` repeats all measurements on this page.

{pairs}
Annotators: how often a label that is no tie agrees with the oracle.

One word of a prompt replaced by another of its kind: how often TA prefers the prompt that is right.

{words}
## Where it is fooled

Rendered clips, damaged at half the strongest degree it was trained on: mean change of each z-score, and the share of
clips whose reward (VQ, MQ and TA weighted {weights}) rose all the same.

{damages}"""


def table(rows: Mapping[str, Mapping[str, float]], formats: Mapping[str, str]) -> str:
    """A Markdown table; formats: format of each column."""
    lines = ["| | " + " | ".join(formats) + " |", "|" + "---|" * (len(formats) + 1)]
    for name, row in rows.items():
        cells = " | ".join(cell(row[key], form) for key, form in formats.items())
        lines.append(f"| {name} | {cells} |")
    return "\n".join(lines) + "\n"


def cell(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def card(figures: Mapping[str, Mapping], parameters: int, command: str) -> str:
    """The card of the reward; command: the one that trained it."""

    def joined(values: Sequence[float]) -> str:
        return ", ".join(f"{value:g}" for value in values)

    return CARD.format(
        parameters=parameters / 1e6,
        error=joined(ERROR),
        tie=joined(TIE),
        least=LEAST,
        command=command,
        weights=joined(list(WEIGHTS.values())),
        pairs=table(figures["pairs"], dict.fromkeys(SCORES, ".1%") | {"pairs": "d"}),
        words=table({"TA": figures["words"]}, dict.fromkeys(ATTRIBUTES, ".1%")),
        damages=table(figures["damages"], dict.fromkeys(SCORES, "+.2f") | {"fooled": ".0%"}),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--model", type=Path, default=Path("assets/tiny"), help="its VAE and samples are judged too"
    )
    add("--reward", type=Path, default=Path("assets/tiny/VideoReward"), help="reward folder")
    add("--clips", type=int, default=512, help="clips per source")
    add("--pairs", type=int, default=2048, help="number of pairs")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(arguments)
    device = torch.device(args.device)
    backbone = open_backbone(args.model, device)
    reward = VideoAlign(args.reward, device)
    settings = backbone.sampling
    size = settings.frames, settings.height, settings.width
    pool = build_pool(backbone, dict.fromkeys(SOURCES, args.clips), SEED, device)
    figures = {
        "pairs": pair_accuracy(reward, pool, draw_pairs(pool, args.pairs, SEED), settings.fps),
        "words": word_accuracy(reward, pool, settings.fps, min(args.clips, len(pool.clips))),
        "damages": damage_effects(reward, size, settings.fps, args.clips // 2),
    }
    command = json.loads((args.reward / "training.json").read_text())["command"]
    (args.reward / "card.json").write_text(json.dumps(figures, indent=1) + "\n")
    parameters = sum(parameter.numel() for parameter in reward.model.parameters())
    text = card(figures, parameters, command)
    (args.reward / "README.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
