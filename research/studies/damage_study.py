"""How the oracle and the reward of the shapes world respond to corruptions of known strength.

    python -m research.studies.damage_study --output outputs/world_study        (a minute on 2 cores)

Writes table.md, a plot of the responses, and a contact sheet of the world and each corruption at full strength.
"""

import argparse
from pathlib import Path

import matplotlib
import torch
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

from sage_grpo.runs.media import contact_sheet, thumbnails
from sage_grpo.tools.figure_style import STYLE
from sage_grpo.worlds.shapes.damage import DAMAGES
from sage_grpo.worlds.shapes.oracle import read
from sage_grpo.worlds.shapes.reward import ShapesReward
from sage_grpo.worlds.shapes.scenes import captions, render, sample_scenes

STRENGTHS = {
    "noise": (0.0, 0.02, 0.05, 0.1, 0.2, 0.3),
    "blur": (0.0, 0.5, 0.75, 1.0, 1.5, 2.0),
    "jitter": (0.0, 0.25, 0.5, 1.0, 2.0, 4.0),
    "fade": (0.0, 0.1, 0.25, 0.5, 0.75, 1.0),
}
SCORES = ("VQ", "MQ", "TA")

Rows = dict[tuple[str, float], dict[str, float]]  # (damage, strength) -> measure -> mean


def quantized(clips: Tensor) -> Tensor:
    """uint8 clips, from clips in [0, 1]."""
    return (clips * 255).round().to(torch.uint8)


def respond(clips: Tensor, sentences: list[str], damage: str, strength: float) -> dict[str, float]:
    """What oracle and reward say about damaged clips, means over the clips."""
    damaged = quantized(DAMAGES[damage](clips, strength, torch.Generator().manual_seed(1)))
    reading = read(damaged, sentences)
    scores = ShapesReward().score(damaged, sentences, fps=8.0)
    row = {
        "distance": reading.distance.mean().item(),
        "match": reading.match.double().mean().item(),
    }
    return row | {name: scores[name].mean().item() for name in SCORES}


def table(rows: Rows) -> str:
    columns = next(iter(rows.values()))
    lines = [
        "| damage | strength | " + " | ".join(columns) + " |",
        "|" + "---|" * (len(columns) + 2),
    ]
    for (damage, strength), row in rows.items():
        cells = " | ".join(f"{value:.3f}" for value in row.values())
        lines.append(f"| {damage} | {strength:g} | {cells} |")
    return "\n".join(lines) + "\n"


def draw(rows: Rows, path: Path) -> None:
    """One column per damage: the oracle above, the reward below, against the strength."""
    figure = Figure(figsize=(4 * len(STRENGTHS), 6), layout="constrained")
    axes = figure.subplots(2, len(STRENGTHS), sharey="row")
    for (damage, strengths), (above, below) in zip(STRENGTHS.items(), axes.T, strict=True):
        series = {name: [rows[damage, s][name] for s in strengths] for name in rows[damage, 0.0]}
        above.plot(strengths, series["distance"], "o-", ms=4, label="distance")
        above.plot(strengths, series["match"], "s--", ms=4, label="prompt match")
        for name in SCORES:
            below.plot(strengths, series[name], "o-", ms=4, label=name)
        above.set_title(damage)
        below.set_xlabel("strength")
    axes[0, 0].set_ylabel("gold: the oracle")
    axes[1, 0].set_ylabel("proxy: the reward")
    axes[0, 0].legend(title="oracle")
    axes[1, 0].legend(title="score")
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("outputs/world_study"))
    parser.add_argument("--clips", type=int, default=64, help="number of clips")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)

    scenes = sample_scenes(args.clips, torch.Generator().manual_seed(7))
    clips = render(scenes, 9, 32, 32)
    sentences = captions(scenes)
    cells = [
        (damage, strength) for damage, strengths in STRENGTHS.items() for strength in strengths
    ]
    rows = {
        (damage, strength): respond(clips, sentences, damage, strength)
        for damage, strength in tqdm(cells, "damage", unit="cell")
    }
    (args.output / "table.md").write_text(table(rows))
    with matplotlib.rc_context(fname=STYLE):
        draw(rows, args.output / "damage.png")

    sheet = [*quantized(clips[:8])]
    labels = list(sentences[:8])
    for name, strengths in STRENGTHS.items():
        strength = strengths[-1]
        damaged = DAMAGES[name](clips[7:8], strength, torch.Generator().manual_seed(1))
        sheet.append(quantized(damaged)[0])
        labels.append(f"the last one with {name} {strength:g}")
    contact_sheet(args.output / "world.png", [thumbnails(clip) for clip in sheet], labels)
    print(table(rows))


if __name__ == "__main__":
    main()
