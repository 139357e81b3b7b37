"""Image to video and 720p on one GPU: the transformer against stock diffusers, and its memory against the planner.

    python -m research.benchmarks.image_to_video --output research/benchmarks/results/DATE-image-to-video-h200.md

480p_i2v           81 x 480 x 848 with an image, the clips of a recipe for image to video
720p_t2v           121 x 720 x 1280, the longest clips of the published models; ours alone, since stock takes minutes
720p_t2v_6_blocks  the same clips in 6 of the 54 blocks, against stock

Forward and LoRA step of one clip, ours and stock on the same random weights, bf16, without guidance. The planner's
figure is that for the same forward or step. The page is written after each part. `--only NAME` runs one part,
`--rehearse` tries the script with a tiny model on the CPU.
"""

import statistics
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from research.benchmarks.parts import Results, about, begin, failure, heading, table, wrapped
from research.benchmarks.stock import StockImageTransformer, StockTransformer
from research.benchmarks.transformer import (
    Bench,
    Clip,
    adapted,
    distance,
    free,
    random_model,
    rollout_to_training,
    set_blocks,
    stock_twin,
    training_step,
)
from sage_grpo.config.parse import from_values
from sage_grpo.models.hunyuan15.image import IMAGE_TOKENS, ImageTransformer
from sage_grpo.models.hunyuan15.transformer import PackedTransformer
from sage_grpo.models.lora import POLICY
from sage_grpo.tools.plan.memory import memory
from sage_grpo.tools.plan.planner import plan_of

BLOCKS = 54  # of the published models


@dataclass(frozen=True)
class Part:
    """What is measured: a clip, and the classes whose forward takes it."""

    version: str
    clip: Clip
    ours: type[PackedTransformer]
    stock: type[StockTransformer] | None = None
    blocks: int = BLOCKS


LARGE = Clip(121, 720, 1280, 150)
PARTS = {
    "480p_i2v": Part(
        "480p_i2v", Clip(81, 480, 848, 150, IMAGE_TOKENS), ImageTransformer, StockImageTransformer
    ),
    "720p_t2v": Part("720p_t2v", LARGE, PackedTransformer),
    "720p_t2v_6_blocks": Part("720p_t2v", LARGE, PackedTransformer, StockTransformer, 6),
}
TINY = {
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "rope_axes_dim": (4, 6, 6),
    "text_embed_dim": 24,
    "text_embed_2_dim": 8,
    "image_embed_dim": 12,
}
STOCK_FORWARD = "forward, stock"
STOCK_STEP = "LoRA step, stock, checkpointed"
FORWARD = "forward, ours, compiled"
STEP = "LoRA step, ours, compiled, attention kept"


def measured(part: Part, rehearse: bool) -> Results:
    """Rows of a table, findings about agreement, and what the planner expects."""
    clip = part.clip
    sizes: dict[str, Any] = {"num_layers": part.blocks}
    bench = Bench(torch.device("cuda"), torch.bfloat16, repeat=1 if clip is LARGE else 2)
    if rehearse:
        clip = replace(clip, frames=5, height=32, width=48, text=7)
        sizes = TINY
        bench = Bench(torch.device("cpu"), torch.float32, repeat=1)
    model = random_model(sizes, bench.device, bench.dtype, part.ours)
    like = next(model.parameters())
    packed = clip.packed(model, like)
    facts = []

    def ours() -> Tensor:
        return model(*packed)

    with torch.no_grad():
        bench.run("forward, ours", ours, 0)
        plain = ours().float()
    if part.stock:
        facts += against_stock(bench, stock_twin(model, part.stock), clip.stock(model, like), plain)
    with torch.no_grad():
        set_blocks(model, compiled=True)
        bench.run(FORWARD, ours, 0)
        apart = distance(ours().float(), plain)
        facts.append(f"compiled to not compiled: velocity {apart:.2g} apart")
    adapted(model, bench.dtype, train_all=False)
    set_blocks(model, recomputed=1.0, keep_attention=True, compiled=True)
    bench.run(STEP, training_step(ours, model), 0)
    facts.append(f"{STEP}: rollout to training {rollout_to_training(ours):.2g}")

    planned = {}
    if part.blocks == BLOCKS:
        planned[FORWARD] = expected(part.version, clip, "rollout")
        planned[STEP] = expected(part.version, clip, "update")
    return {
        "rows": [asdict(row) for row in bench.rows],
        "facts": facts,
        "planned": planned,
        "clip": asdict(clip),
    }


def against_stock(
    bench: Bench, twin: StockTransformer, padded: dict[str, Tensor], plain: Tensor
) -> list[str]:
    """Time the stock model, whose weights are ours; returns how far its velocity is from ours."""

    def stock() -> Tensor:
        return twin(**padded, return_dict=False)[0]

    with torch.no_grad():
        bench.run(STOCK_FORWARD, stock, 0)
        apart = distance(plain, stock().float())
    adapted(twin, bench.dtype, train_all=False)
    twin.enable_gradient_checkpointing()
    bench.run(STOCK_STEP, training_step(stock, twin.train()), 0)
    twin.eval().delete_adapters(POLICY)
    return [f"ours to stock: velocity {apart:.2g} apart (stock rounds timesteps)"]


def expected(version: str, clip: Clip, moment: str) -> float:
    """GiB that the planner counts for the transformer alone, at full size."""
    flags = {
        "pretrained_model_root": "absent",
        "pretrained_transformer_version": version,
        "use_lora": True,
        "num_frames": clip.frames,
        "height": clip.height,
        "width": clip.width,
        "guidance_scale": 1.0,
        "batch_size": 4,
        "micro_batch_size": 1,
        "compile": True,
        "keep_attention": True,
        "kl_weight": 0.0,
        "validation_videos": 0,
        "master_weight_type": "bf16",
    }
    parts = memory(plan_of(from_values(flags), 1, clip.text))
    return sum(parts[part][moment] for part in ("weights", "gradients", "activations")) / 2**30


def page(results: Results) -> str:
    """The results as Markdown."""
    lines = heading("Image to video and 720p", results["about"])
    for name in PARTS:
        part = results["parts"].get(name)
        lines += ["", f"## {name}", ""]
        lines += part_page(part) if part and "error" not in part else failure(name, part)
    return wrapped(lines)


def part_page(part: dict[str, Any]) -> list[str]:
    """Times against those of stock, peaks against the planner's, and how far the velocities are apart."""
    medians = {row["name"]: statistics.median(row["milliseconds"]) for row in part["rows"]}
    rows = []
    for row in part["rows"]:
        name, peak = row["name"], row["peak"]
        median = medians[name]
        stock = medians.get(STOCK_FORWARD if name.startswith("forward") else STOCK_STEP)
        times = f"{stock / median:.2f}" if stock else ""
        planned = part["planned"].get(name)
        planned_text = f"{planned:.1f} ({peak / planned - 1:+.0%})" if planned else ""
        rows.append((name, f"{median:.0f}", times, f"{peak:.1f}", planned_text))
    clip = part["clip"]
    context = f"{clip['text'] + clip['image']} tokens beside it"
    size = f"one clip of {clip['frames']} x {clip['height']} x {clip['width']}, {context}"
    head = (size, "ms", "times as fast as stock", "peak GiB", "planned GiB (measured)")
    return [*table(head, rows), "", *(f"- {fact}" for fact in part["facts"]), ""]


def main(arguments: list[str] | None = None) -> None:
    options, parts = begin(__doc__, tuple(PARTS), page, arguments)
    parts.results.setdefault("about", about())
    for name, part in PARTS.items():
        parts.run(name, options.limit, lambda _, part=part: measured(part, options.rehearse))
        free()
    parts.end()


if __name__ == "__main__":
    main()
