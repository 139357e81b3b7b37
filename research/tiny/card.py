"""How good is a model of the shapes world? Recomputes the quality table of its card and draws contact sheets.

    python -m research.tiny.card --model_path assets/tiny --output outputs/tiny_quality

The oracle reads one clip per prompt (7 minutes on 2 cores). Distances are RMS pixel differences; the VAE row is the
floor that no sample can beat. Writes quality.json, table.md, and contact sheets of the world, VAE round trips, samples
and each sampler's noise. With `--card`, the model folder gets its card: README.md, built from its training.json and
these figures, with quality.json and samples.png.
"""

import argparse
import json
import math
import shlex
import shutil
import textwrap
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLHunyuanVideo15, HunyuanVideo15Transformer3DModel
from torch import Tensor, nn
from transformers import Qwen2_5_VLTextModel, SiglipVisionModel, T5EncoderModel

from research.tiny.quality import quality, random_prompts, sample_clips
from sage_grpo.algo.sde import SDES, build_schedule, flow_sigmas
from sage_grpo.data.requests import read_requests
from sage_grpo.intervals import student_95
from sage_grpo.models.backbone import Backbone
from sage_grpo.models.hunyuan15.backbone import Hunyuan15
from sage_grpo.models.registry import open_backbone
from sage_grpo.runs.media import contact_sheet, thumbnails
from sage_grpo.worlds.shapes.scenes import ATTRIBUTES
from sage_grpo.worlds.shapes.world import round_trip

COLUMNS = ("match", *ATTRIBUTES, "distance", "prompt_distance", "distance_above_vae")
SHOWN = 10  # clips on a contact sheet


def measure(
    backbone: Backbone, prompts: list[str], guidance: float
) -> tuple[dict[str, float], Tensor]:
    """Quality of one clip per prompt sampled with the ODE, and the clips."""
    settings = backbone.sampling
    schedule = build_schedule("ode", flow_sigmas(settings.num_steps, settings.shift), 0.0)
    schedule = schedule.to(backbone.device)
    clips = torch.cat(list(sample_clips(backbone, schedule, prompts, 1, guidance)))
    return counted(clips, prompts), clips


def counted(clips: Tensor, prompts: list[str]) -> dict[str, float]:
    """Quality with the number of clips and the standard error of `match`; the clips are independent."""
    row = quality(clips, prompts)
    match_error = math.sqrt(row["match"] * (1 - row["match"]) / len(clips))
    return row | {"clips": len(clips), "match_error": match_error}


def chance() -> dict[str, float]:
    """Expected scores of random guessing."""
    guess = {name: 1 / len(words) for name, words in ATTRIBUTES.items()}
    return guess | {"match": torch.tensor(list(guess.values())).prod().item()}


def table(rows: dict[str, dict[str, float]]) -> str:
    """A Markdown table of COLUMNS."""
    titles = " | ".join(COLUMNS).replace("_", " ").replace("vae", "VAE")
    lines = [f"| | {titles} |", "|" + "---|" * (len(COLUMNS) + 1)]
    for name, row in rows.items():
        cells = " | ".join(cell(column, row) for column in COLUMNS)
        lines.append(f"| {name} | {cells} |")
    return "\n".join(lines) + "\n"


def cell(column: str, row: dict[str, float]) -> str:
    """A distance, or a share in percent; the match with half of its 95 % interval."""
    if column not in row:
        return ""
    value = row[column]
    if "distance" in column:
        return f"{value:.3f}"
    decimals = 0 if value in (0, 1) else 1
    text = f"{100 * value:.{decimals}f}"
    if column == "match" and row.get("match_error"):
        half = student_95(row["clips"] - 1) * row["match_error"]
        text += f" ± {100 * half:.1f}"
    return f"{text} %"


def noise_sheet(backbone: Backbone, prompt: str, eta: float, path: Path) -> None:
    """Two rollouts per sampler, side by side; the samplers share the initial noise."""
    settings = backbone.sampling
    sigmas = flow_sigmas(settings.num_steps, settings.shift)
    rows = []
    labels = []
    for name in ("ode", *(name for name in SDES if name != "ode")):
        schedule = build_schedule(name, sigmas, eta).to(backbone.device)
        (pair,) = sample_clips(backbone, schedule, [prompt], 2, settings.guidance)
        rows.append(np.concatenate([thumbnails(clip) for clip in pair]))
        noise = "no noise" if name == "ode" else f"eta {eta:g}"
        labels.append(f"{name}, {noise}: {prompt}")
    contact_sheet(path, rows, labels)


CARD = """# A tiny HunyuanVideo-1.5 that knows the moving-shapes world

It has the classes of the full-size model at small sizes. Clips have {frames} frames of {height}x{width} at
{fps} fps. The model is for tests, demonstrations and studies of reinforcement learning on a CPU. `docs/world.md`
explains the world, in which every clip can be judged exactly. It was trained from scratch on rendered clips, without
third-party weights or data.

![{shown} prompts at guidance {guidance:g}](samples.png)

## Use

    python generate.py --prompt "a large red triangle moving left slowly on a white background"

A prompt names a color, a shape or quoted letter, and a direction; size, speed and background are optional. Unknown
words are refused. `prompts_train.txt` and `prompts_valid.txt` hold examples, with no caption in both. The stock
pipeline also reads the folder, without network access:

```python
from diffusers import HunyuanVideo15Pipeline

pipe = HunyuanVideo15Pipeline.from_pretrained("assets/tiny")
size = {{"height": {height}, "width": {width}, "num_frames": {frames}}}
clip = pipe("a small cyan circle moving up", **size, num_inference_steps={num_steps}).frames[0]
```

## Parts

{parts}

Weights are stored in half precision, except for one 8-bit matrix of the glyph projection; {megabytes:.0f} MB
in total. A clip has {latent} latents (channels, frames, rows, columns).
`sampling.json` holds the default settings: {num_steps} Euler steps, shift {shift:g}, guidance {guidance:g}.

## Training

    {command}

{story}

{flags}

## Quality

One clip for each of {clips} random prompts, {num_steps} Euler steps, read by the exact oracle; ± is half of a 95 %
interval. `python -m research.tiny.card --card` repeats the measurement and writes this card. *match* is the share of
clips that show all attributes of their prompt; the columns after it count each attribute alone. Distances are RMS pixel
differences, 1 being the full range: to the nearest clip of the world, to the nearest one that the prompt allows, and
the first minus the VAE's floor.

{table}
{images}## Limits

- The {weakest} is the hardest attribute: {weakest_share:.0f} % are right at guidance {guidance:g}.
- A clip matches if the nearest clip of the world has the right attributes. It may still be misshapen; the distances
  show by how much.
- Only the VAE and the transformer are trained. The encoders are random and fixed.
- The model was trained on one size and length, {frames} frames of {height}x{width}: expect longer or larger
  clips to fall apart.
- The prompts of the table and those of training come from the same {captions:,} captions. Quality on unseen
  combinations was not measured.
- What works on it need not work on the full-size model.
"""


IMAGES = """## Image to video

    python generate.py --pretrained_transformer_version i2v --image assets/tiny/images/valid-00.png \\
        --prompt {prompt}

Afterwards `python -m research.tiny.learn_images --model assets/tiny`
({steps} steps, {seconds} s, CPU threads: {threads}) taught it to begin a clip with an image. This changed no weight
that text to video reads. `images_train.csv` and `images_valid.csv` hold requests with images. One clip of each, read by
the oracle; *image match* is the share of clips that begin with the object of the image, within about two pixels of its
place.

{table}
"""

STORY = (
    "took {seconds} s on one {device} (torch {torch}, diffusers {diffusers}, Python {python}). First the VAE was "
    "trained on rendered clips ({vae_seconds} s{other}), then the transformer by flow matching on its latents, with a "
    "tenth of the captions dropped for guidance. "
)
HABIT = (
    "In {wrong:.0%} of its clips the {misnamed} is not the one that the caption names: a wrong habit for "
    "reinforcement learning to correct. "
)


def card(backbone: Hunyuan15, rows: dict[str, dict[str, float]]) -> str:
    """The model card: contents of the folder, training, and quality."""
    settings = backbone.sampling
    folder = backbone.folder
    record = json.loads((folder / "training.json").read_text())
    flags = record.pop("flags")
    row = rows[f"guidance {settings.guidance:g}"]

    other = f", by `{record['vae_command']}`" if "vae_command" in record else " of these"
    story = STORY.format(**record, other=other)
    if float(flags["wrong"]):
        story += HABIT.format(wrong=float(flags["wrong"]), misnamed=flags["misnamed"])
    story += "Every random draw follows from the seed. The settings, also in `training.json`:"
    flags_text = ", ".join(f"{name} {value}" for name, value in flags.items() if value != "None")

    images = ""
    if (folder / "images.json").is_file():
        images = images_section(folder, json.loads((folder / "images.json").read_text()))
    bytes_in_all = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    latent = backbone.latent_shape(settings.frames, settings.height, settings.width)
    weakest = min(ATTRIBUTES, key=row.__getitem__)
    return CARD.format(
        **record,
        **vars(settings),
        story=textwrap.fill(story, 120),
        flags=textwrap.fill(flags_text, 120),
        images=images,
        parts=parts(backbone),
        table=table(rows),
        clips=row["clips"],
        shown=min(SHOWN, row["clips"]),
        megabytes=bytes_in_all / 1e6,
        latent="x".join(map(str, latent)),
        weakest=weakest,
        weakest_share=100 * row[weakest],
        captions=math.prod(map(len, ATTRIBUTES.values())),
    )


def images_section(folder: Path, record: dict) -> str:
    """What the card says about image to video."""
    first = read_requests(folder / "images_valid.csv")[0]
    lines = ["| | clips | match | image match | image distance |", "|---|---|---|---|---|"]
    for name, row in record["quality"].items():
        columns = ("match", "image_match", "image_distance")
        cells = " | ".join(cell(column, row) for column in columns)
        lines.append(f"| {name} | {row['clips']} | {cells} |")
    facts = record | record["flags"]
    return IMAGES.format(**facts, prompt=shlex.quote(first.text), table="\n".join(lines)) + "\n"


def parts(backbone: Hunyuan15) -> str:
    """A table of the networks in the folder."""
    folder = backbone.folder
    net = backbone.transformer.config
    vae = backbone.vae.config
    spatial = vae.spatial_compression_ratio
    compression = f"{vae.temporal_compression_ratio}x{spatial}x{spatial}"
    local = {"local_files_only": True}
    text = Qwen2_5_VLTextModel.from_pretrained(folder / "text_encoder", **local)
    glyph = T5EncoderModel.from_pretrained(folder / "text_encoder_2", **local)

    def row(kind: type[nn.Module], size: str, network: nn.Module) -> str:
        count = sum(parameter.numel() for parameter in network.parameters())
        return f"| `{kind.__name__}` | {size} | {count / 1e6:.2f} M |"

    rows = [
        row(
            HunyuanVideo15Transformer3DModel,
            f"{net.num_layers} layers, {net.num_attention_heads} heads of {net.attention_head_dim}",
            backbone.transformer,
        ),
        row(
            AutoencoderKLHunyuanVideo15,
            f"{vae.latent_channels} channels, {compression} compression",
            backbone.vae,
        ),
        row(
            Qwen2_5_VLTextModel,
            f"{text.config.num_hidden_layers} layers, {text.config.hidden_size} wide, untrained",
            text,
        ),
        row(
            T5EncoderModel,
            f"{glyph.config.num_layers} layers, {glyph.config.d_model} wide, untrained",
            glyph,
        ),
    ]
    if (folder / "image_encoder").is_dir():
        vision = SiglipVisionModel.from_pretrained(folder / "image_encoder", **local)
        layers = vision.config.num_hidden_layers
        size = f"{layers} layer, {vision.config.hidden_size} wide, untrained"
        rows.append(row(SiglipVisionModel, size, vision))
    return "\n".join(["| class | size | parameters |", "|---|---|---|", *rows])


def floor(backbone: Backbone, count: int, output: Path) -> dict[str, float]:
    """Quality of rendered clips after a VAE round trip; draws them before and after."""
    clips, decoded, sentences = round_trip(backbone, count)
    world = [thumbnails(clip) for clip in clips[:SHOWN]]
    contact_sheet(output / "world.png", world, sentences[:SHOWN])

    rows = []
    labels = []
    for i in range(min(SHOWN // 2, len(clips))):
        rows += [thumbnails(clips[i]), thumbnails(decoded[i])]
        labels += [sentences[i], "after the VAE"]
    contact_sheet(output / "round_trip.png", rows, labels)
    return counted(decoded, sentences)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model_path", type=Path, default=Path("assets/tiny"), help="model folder")
    add("--output", type=Path, default=Path("outputs/tiny_quality"), help="folder of the results")
    add("--prompts", type=int, default=256, help="number of prompts")
    add("--eta", type=float, default=0.5, help="eta on the contact sheet of the samplers' noise")
    add("--card", action="store_true", help="write README.md and its figures into the model folder")
    add("--again", action="store_true", help="write README.md from the quality.json that is there")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(arguments)
    backbone = open_backbone(args.model_path, args.device)
    if args.again:
        rows = json.loads((args.model_path / "quality.json").read_text())
        (args.model_path / "README.md").write_text(card(backbone, rows))
        return
    prompts = random_prompts(args.prompts, seed=1)
    args.output.mkdir(parents=True, exist_ok=True)

    rows = {"chance": chance(), "VAE round trip": floor(backbone, args.prompts, args.output)}
    for guidance in dict.fromkeys((1.0, backbone.sampling.guidance)):
        rows[f"guidance {guidance:g}"], sampled = measure(backbone, prompts, guidance)
        sheet = args.output / f"samples_guidance_{guidance:g}.png"
        contact_sheet(sheet, [thumbnails(clip) for clip in sampled[:SHOWN]], prompts[:SHOWN])
    for row in rows.values():
        if "distance" in row:
            row["distance_above_vae"] = row["distance"] - rows["VAE round trip"]["distance"]
    noise_sheet(backbone, prompts[0], args.eta, args.output / "samplers.png")
    (args.output / "quality.json").write_text(json.dumps(rows, indent=2) + "\n")
    (args.output / "table.md").write_text(table(rows))
    if args.card:
        # The last sheet is that of the default guidance.
        shutil.copyfile(sheet, args.model_path / "samples.png")
        shutil.copyfile(args.output / "quality.json", args.model_path / "quality.json")
        (args.model_path / "README.md").write_text(card(backbone, rows))
    print(table(rows))


if __name__ == "__main__":
    main()
