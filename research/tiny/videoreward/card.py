"""How well does the embedded reward judge? Recomputes the figures of its card from clips that it never saw.

    python -m research.tiny.videoreward.card              (minutes on 2 cores; writes README.md and card.json beside it)

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
WEIGHTS = {"VQ": 0.5, "MQ": 0.5, "TA": 1.0}  # the default of `reward_weights`


def score(reward: VideoAlign, clips: Tensor, prompts: Sequence[str], fps: float) -> Tensor:
    """(N, 3) z-scores."""
    rows = tqdm(
        list(zip(clips.split(64), _chunks(prompts, 64), strict=True)),
        "reward",
        unit="batch",
        leave=False,
    )
    found = [reward.score(list(part), texts, fps) for part, texts in rows]
    return torch.cat([torch.stack([scores[name] for name in SCORES], 1) for scores in found])


def _chunks(prompts: Sequence[str], size: int) -> list[Sequence[str]]:
    return [prompts[i : i + size] for i in range(0, len(prompts), size)]


def pair_accuracy(
    reward: VideoAlign, pool: Pool, pairs: Pairs, fps: float
) -> dict[str, dict[str, float | None]]:
    """Share of the pairs ordered as the oracle orders them: all, by source, and what annotators themselves reach.

    None where no pairs differ: rendered clips all move perfectly.
    """
    scores = score(
        reward, pool.clips[pairs.clips.flatten()], [p for p in pairs.prompts for _ in range(2)], fps
    )
    difference = scores[::2] - scores[1::2]
    source = pool.source.cpu()[pairs.clips]
    groups = {"all": torch.ones(len(source), dtype=torch.bool)}
    groups |= {f"both {name}": (source == i).all(1) for i, name in enumerate(SOURCES)}
    groups["of two sources"] = source[:, 0] != source[:, 1]
    rows = {
        name: {
            kind: accuracy(difference[chosen, i], pairs.truth[chosen, i], LEAST)
            for i, kind in enumerate(SCORES)
        }
        | {"pairs": int(chosen.sum())}
        for name, chosen in groups.items()
    }
    rows = {
        name: {key: None if math.isnan(x) else x for key, x in row.items()}
        for name, row in rows.items()
    }
    return rows | {"annotators": agreement(pairs)}


def agreement(pairs: Pairs) -> dict[str, float]:
    """Share of the annotators' labels that agree with the truth, among those that are no ties."""
    return {
        kind: accuracy(pairs.labels[chosen, i], pairs.truth[chosen, i], LEAST)
        for i, kind in enumerate(SCORES)
        for chosen in [pairs.labels[:, i] != 0]
    } | {"pairs": len(pairs.prompts)}


def word_accuracy(reward: VideoAlign, pool: Pool, fps: float, count: int) -> dict[str, float]:
    """By attribute: how often TA prefers what a clip shows to the same prompt with this one word replaced."""
    generator = torch.Generator().manual_seed(SEED)
    chosen = torch.randperm(len(pool.clips), generator=generator)[:count]
    shown = pool.attributes.cpu()[chosen]
    clips, right = (
        pool.clips.cpu()[chosen],
        score(reward, pool.clips[chosen], _sentences(shown), fps)[:, 2],
    )
    found = {}
    for column, (name, words) in enumerate(ATTRIBUTES.items()):
        wrong = shown.clone()
        wrong[:, column] += torch.randint(1, len(words), (len(shown),), generator=generator)
        wrong[:, column] %= len(words)
        found[name] = (
            (score(reward, clips, _sentences(wrong), fps)[:, 2] < right).double().mean().item()
        )
    return found


def _sentences(classes: Tensor) -> list[str]:
    return [
        sentence({name: words[i] for (name, words), i in zip(ATTRIBUTES.items(), row, strict=True)})
        for row in classes.tolist()
    ]


def damage_effects(
    reward: VideoAlign, size: tuple[int, int, int], fps: float, count: int
) -> dict[str, dict[str, float]]:
    """By damage at half its strongest: mean change of each score, and the share of clips whose weighted sum rises."""
    scenes = sample_scenes(count, torch.Generator().manual_seed(SEED))
    clips, prompts = render(scenes, *size), captions(scenes)
    plain, weights = (
        score(reward, as_uint8(clips), prompts, fps),
        torch.tensor([WEIGHTS[name] for name in SCORES]),
    )
    found = {}
    for name, damage in DAMAGES.items():
        hurt = as_uint8(damage(clips, STRONGEST[name] / 2, torch.Generator().manual_seed(SEED)))
        change = score(reward, hurt, prompts, fps) - plain
        means = {kind: change[:, i].mean().item() for i, kind in enumerate(SCORES)}
        found[name] = means | {"fooled": ((change @ weights) > 0).double().mean().item()}
    return found


CARD = """# A tiny VideoAlign that learned to judge moving shapes

A Qwen2-VL of {parameters:.1f} M parameters in the folder format of VideoAlign, read by the class that reads the
published weights. It was trained by `research/tiny/videoreward/learn.py` on pairs of clips, with VideoAlign's kind of loss
(Bradley-Terry with ties) and labels of simulated annotators: the oracle's judgement with an error of {error} and ties
below {tie} (VQ, MQ, TA). Like any learned reward it is a proxy, and errs.

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
    lines = ["| | " + " | ".join(formats) + " |", "|" + "---|" * (len(formats) + 1)]
    for name, row in rows.items():
        lines.append(
            f"| {name} | "
            + " | ".join(cell(row[key], form) for key, form in formats.items())
            + " |"
        )
    return "\n".join(lines) + "\n"


def cell(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def card(figures: Mapping[str, Mapping], parameters: int, command: str) -> str:
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


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, default=Path("assets/tiny"), help="its VAE and samples are judged too"
    )
    parser.add_argument("--reward", type=Path, default=Path("assets/tiny/VideoReward"))
    parser.add_argument("--clips", type=int, default=512, help="clips per source")
    parser.add_argument("--pairs", type=int, default=2048)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(words)
    device = torch.device(args.device)
    backbone, reward = open_backbone(args.model, device), VideoAlign(args.reward, device)
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
    text = card(figures, sum(p.numel() for p in reward.model.parameters()), command)
    (args.reward / "README.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
