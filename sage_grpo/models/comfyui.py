"""What ComfyUI reads: a LoRA, or all weights of a transformer, in one file with the names of ComfyUI's own modules.

A LoRA has `diffusion_model.MODULE.lora_A.weight` and `.lora_B.weight`. ComfyUI multiplies B A by 1 where no alpha is
stored, so alpha / r is folded into B. It drops what it cannot place with a line in its log; here that is an error.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from sage_grpo.files.tensor_files import all_finite
from sage_grpo.models.denoiser import TRANSFORMER
from sage_grpo.models.lora import read_scaled_adapter
from sage_grpo.models.names import NameRule, find, read_rules, to_original
from sage_grpo.models.weights import Weights

PREFIX = "diffusion_model."
LAYOUT = "ComfyUI's layout"

# The rules of each table of names. To add one, write the table beside the backbone.
TABLES = sorted(Path(__file__).parent.glob("*/comfyui_names.txt"))
RULES = [read_rules(table)["transformer"] for table in TABLES]


# What the files of two transformers are called after, by folder; ComfyUI loads each into a model of its own.
SUFFIXES = {TRANSFORMER: "_high_noise", "transformer_2": "_low_noise"}


def file_name(name: str, expert: str, is_one_of_two: bool) -> str:
    """The file of a transformer in a folder or repository called `name`."""
    suffix = SUFFIXES[expert] if is_one_of_two else ""
    return f"{name}{suffix}.safetensors"


def has_layout(names: Iterable[str]) -> bool:
    """Whether ComfyUI has a place for every transformer tensor with these diffusers names."""
    names = list(names)
    rules = _closest(names)
    return all(find(rules, name) for name in names)


def _closest(names: Sequence[str]) -> list[NameRule]:
    """The rules of the model that has most of the names; `to_original` and `lora` then reject the others."""

    def num_known(rules: list[NameRule]) -> int:
        return sum(find(rules, name) is not None for name in names)

    return max(RULES, key=num_known)


def all_weights(weights: Weights) -> Weights:
    """A transformer's weights with diffusers names, renamed and stacked as ComfyUI has them."""
    rules = _closest(weights.names)
    return weights.renamed(to_original(rules, weights.names, LAYOUT))


def write_lora(adapter: Path, file: Path, dtype: torch.dtype | None = None) -> None:
    """Write a checkpoint's adapter as ComfyUI reads it; without `dtype`, in its own."""
    stored, scale = read_scaled_adapter(adapter)
    dtypes = {tensor.dtype for tensor in stored.values()}
    if dtype is None and len(dtypes) == 1:
        dtype = dtypes.pop()
    save_file(cast(lora(stored, scale), dtype), file, metadata={"format": "pt"})


def lora(adapter: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """An adapter's A (r, in) and B (out, r) by diffusers name, as ComfyUI has them; fp32.

    scale: alpha / r. Where ComfyUI stacks several layers, A stacks their A, and B holds their B as blocks: each takes
    its rows of the output, and its columns of the stacked A. Layers without an adapter leave their rows at 0.
    """
    layers = [
        name.removesuffix(".lora_A.weight") for name in adapter if name.endswith(".lora_A.weight")
    ]
    rules = _closest([f"{layer}.weight" for layer in layers])

    # of each ComfyUI module: the rule, A and B of the layers that it consists of
    parts: dict[str, list[tuple[NameRule, Tensor, Tensor]]] = {}
    for layer in layers:
        match = find(rules, f"{layer}.weight")
        if match is None:
            raise ValueError(f"the adapter of {layer} has no place in {LAYOUT}")
        rule, name = match
        a = adapter[f"{layer}.lora_A.weight"].float()
        b = scale * adapter[f"{layer}.lora_B.weight"].float()
        parts.setdefault(name.removesuffix(".weight"), []).append((rule, a, b))

    tensors = {}
    for module, pairs in parts.items():
        _check_sizes(module, pairs)
        tensors[f"{PREFIX}{module}.lora_A.weight"] = torch.cat([a for _, a, _ in pairs])
        tensors[f"{PREFIX}{module}.lora_B.weight"] = _stack_b(pairs)
    return tensors


def _check_sizes(module: str, pairs: Sequence[tuple[NameRule, Tensor, Tensor]]) -> None:
    """Reject layers that cannot be stacked into one module, because their inputs or outputs differ."""
    inputs = {a.shape[1] for _, a, _ in pairs}
    rows = {len(b) / len(rule.blocks) for rule, _, b in pairs}
    if len(inputs) > 1 or len(rows) > 1 or not min(rows).is_integer():
        raise ValueError(
            f"the adapter has layers of several sizes for {module} of {LAYOUT}; save it again"
        )


def _stack_b(pairs: Sequence[tuple[NameRule, Tensor, Tensor]]) -> Tensor:
    """B of a module, (rows of all its blocks, sum of the layers' r)."""
    rule, _, b = pairs[0]
    block_rows = len(b) // len(rule.blocks)
    total_rank = sum(b.shape[1] for _, _, b in pairs)
    stacked = torch.zeros(rule.num_blocks * block_rows, total_rank)

    column = 0
    for rule, _, b in pairs:
        rank = b.shape[1]
        for block, rows in zip(rule.blocks, b.chunk(len(rule.blocks)), strict=True):
            start = block * block_rows
            stacked[start : start + block_rows, column : column + rank] = rows
        column += rank
    return stacked


def cast(tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """The tensors in another data type, or as they are; numbers that it cannot hold are an error."""
    converted = {}
    for name, tensor in tensors.items():
        converted[name] = tensor if dtype is None else tensor.to(dtype)
        if not all_finite(converted[name]):
            raise ValueError(f"{name} has numbers that {dtype} cannot hold; use --dtype bfloat16")
    return converted
