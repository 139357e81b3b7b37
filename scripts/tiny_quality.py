"""How good is a model of the shapes world? Recomputes the quality table of its card, and draws sheets to look at.

    python scripts/tiny_quality.py --model_path assets/tiny --output outputs/tiny_quality

The oracle reads every clip. Distances are RMS pixel differences; the VAE row is the floor that no sample can beat.
Writes quality.json, table.md, and contact sheets of the world, the VAE's round trip, samples and each sampler's noise.
With `--card` also the folder's README.md, from its training.json and these figures.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from sage_grpo.algo.sde import SDES, build_schedule, flow_sigmas
from sage_grpo.media import contact_sheet, thumbnails
from sage_grpo.models.hunyuan15 import Hunyuan15
from sage_grpo.worlds.quality import quality, random_prompts, round_trip, sample_clips
from sage_grpo.worlds.shapes import ATTRIBUTES

COLUMNS = ("match", *ATTRIBUTES, "distance", "prompt_distance", "distance_above_vae")


def measure(policy: Hunyuan15, prompts: list[str], per_prompt: int, guidance: float) -> tuple[dict[str, float], Tensor]:
    """Quality of clips sampled by the ODE, and the clips."""
    settings = policy.sampling
    schedule = build_schedule("ode", flow_sigmas(settings.num_steps, settings.shift), 0.0).to(policy.device)
    clips = torch.cat(list(sample_clips(policy, schedule, prompts, per_prompt, guidance)))
    return quality(clips, [prompt for prompt in prompts for _ in range(per_prompt)]), clips


def chance() -> dict[str, float]:
    """What guessing gives."""
    guess = {name: 1 / len(words) for name, words in ATTRIBUTES.items()}
    return guess | {"match": torch.tensor(list(guess.values())).prod().item()}


def table(rows: dict[str, dict[str, float]]) -> str:
    lines = ["| | " + " | ".join(COLUMNS) + " |", "|" + "---|" * (len(COLUMNS) + 1)]
    for name, row in rows.items():
        lines.append(f"| {name} | " + " | ".join(cell(column, row.get(column)) for column in COLUMNS) + " |")
    return "\n".join(lines) + "\n"


def cell(column: str, value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if "distance" in column else f"{100 * value:.1f} %"


def noise_sheet(policy: Hunyuan15, prompt: str, eta: float, path: Path) -> None:
    """The same initial noise under each sampler."""
    settings, clips = policy.sampling, []
    for name in SDES:
        schedule = build_schedule(name, flow_sigmas(settings.num_steps, settings.shift), eta).to(policy.device)
        (batch,) = sample_clips(policy, schedule, [prompt], 1, settings.guidance)
        clips.append(batch[0])
    contact_sheet(path, [thumbnails(clip) for clip in clips], [f"{name}, eta {eta}" for name in SDES])


CARD = """# A tiny HunyuanVideo-1.5 that knows the moving-shapes world

Every class is the one of the full-size model, every size is small: {parameters}. Clips have {frames} frames of
{height}x{width} at {fps} fps. Half precision on disk; it loads with `Hunyuan15("assets/tiny")` and with the stock
`HunyuanVideo15Pipeline.from_pretrained("assets/tiny")`, without a network. `docs/world.md` explains the world.

## Training

    {command}

on one {device} in {seconds} s, {vae_seconds} s of them for the VAE (torch {torch}, diffusers {diffusers}, Python
{python}). Everything follows from the seed. A tenth of the captions was dropped, for guidance. Settings: {flags}.

## Quality

{clips} clips of {prompts} random prompts, {num_steps} Euler steps, shift {shift:g}, read by the exact oracle
(`python scripts/tiny_quality.py --card`). Distances are RMS pixel differences to the nearest clip of the world, and to
the nearest one that the prompt allows; the VAE row is the floor.

{table}
"""


def card(policy: Hunyuan15, rows: dict[str, dict[str, float]], prompts: int, per_prompt: int) -> str:
    """The model card: how the folder was made, and how good it is."""
    record = json.loads((policy.folder / "training.json").read_text())
    parts = {"transformer": policy.transformer, "VAE": policy.vae}
    counts = ", ".join(
        f"{name} {sum(p.numel() for p in part.parameters()) / 1e6:.2f} M" for name, part in parts.items()
    )
    flags = ", ".join(f"{name} {value}" for name, value in record.pop("flags").items())
    figures = {"parameters": counts, "flags": flags, "clips": prompts * per_prompt, "prompts": prompts}
    return CARD.format(**record, **figures, table=table(rows), **vars(policy.sampling))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_path", type=Path, default=Path("assets/tiny"))
    parser.add_argument("--output", type=Path, default=Path("outputs/tiny_quality"))
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--per_prompt", type=int, default=2)
    parser.add_argument("--eta", type=float, default=0.5)
    parser.add_argument("--card", action="store_true", help="write README.md into the model folder")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(arguments)
    policy = Hunyuan15(args.model_path, args.device)
    prompts = random_prompts(args.prompts, seed=1)
    args.output.mkdir(parents=True, exist_ok=True)

    clips, decoded, sentences = round_trip(policy, args.prompts)
    rows = {"chance": chance(), "VAE round trip": quality(decoded, sentences)}
    pairs = [clip for pair in zip(clips[:5], decoded[:5], strict=True) for clip in pair]
    labels = [label for sentence in sentences[:5] for label in (sentence, "after the VAE")]
    contact_sheet(args.output / "world.png", [thumbnails(clip) for clip in clips[:10]], sentences[:10])
    contact_sheet(args.output / "round_trip.png", [thumbnails(clip) for clip in pairs], labels)
    for guidance in dict.fromkeys((1.0, policy.sampling.guidance)):
        rows[f"guidance {guidance:g}"], sampled = measure(policy, prompts, args.per_prompt, guidance)
        first = [thumbnails(clip) for clip in sampled[:: args.per_prompt][:10]]
        contact_sheet(args.output / f"samples_guidance_{guidance:g}.png", first, prompts[: len(first)])
    floor = rows["VAE round trip"]["distance"]
    for row in rows.values():
        if "distance" in row:
            row["distance_above_vae"] = row["distance"] - floor
    noise_sheet(policy, prompts[0], args.eta, args.output / "noise.png")
    (args.output / "quality.json").write_text(json.dumps(rows, indent=2) + "\n")
    (args.output / "table.md").write_text(table(rows))
    if args.card:
        (args.model_path / "README.md").write_text(card(policy, rows, args.prompts, args.per_prompt))
    print(table(rows))


if __name__ == "__main__":
    main()
