"""LoRA adapters in a transformer: the policy's, and a second one for the anchor. Only the policy's is trained."""

import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from diffusers import HunyuanVideo15Transformer3DModel
from peft import LoraConfig
from safetensors.torch import load_file
from torch import Tensor, nn

LORA_FILE = "pytorch_lora_weights.safetensors"
POLICY, ANCHOR = "policy", "anchor"


def dead_modules(transformer: HunyuanVideo15Transformer3DModel) -> tuple[str, ...]:
    """Modules whose outputs a text-to-video forward never uses: they get no gradient, so they are never trained.

    The image tokens are absent; the context that leaves the last block is dropped, so its queries do nothing.
    """
    last = f"transformer_blocks.{len(transformer.transformer_blocks) - 1}"
    unread = ("attn.add_q_proj", "attn.norm_added_q", "attn.to_add_out", "ff_context")
    return ("image_embedder", *(f"{last}.{name}" for name in unread))


def target_layers(transformer: HunyuanVideo15Transformer3DModel, names: Sequence[str]) -> list[str]:
    """Full names of the linear layers of the blocks that end in one of `names`."""
    linears = [name for name, module in transformer.named_modules() if isinstance(module, nn.Linear)]
    blocks = [name for name in linears if name.startswith("transformer_blocks.")]
    missing = [name for name in names if not any(layer.endswith(f".{name}") for layer in blocks)]
    if missing:
        known = sorted({layer.split(".", 2)[2].removeprefix("attn.") for layer in blocks})
        raise ValueError(f"lora_target_modules names {missing[0]}; linear layers of the blocks are {', '.join(known)}")
    dead = dead_modules(transformer)
    chosen = [layer for layer in blocks if any(layer.endswith(f".{name}") for name in names)]
    return [layer for layer in chosen if not layer.startswith(dead)]


def add_adapters(
    transformer: HunyuanVideo15Transformer3DModel,
    rank: int,
    alpha: float,
    names: Sequence[str],
    seed: int,
    dtype: torch.dtype,
    anchor: bool,
) -> None:
    """A new policy adapter, which changes nothing yet, and with `anchor` a copy of it that can be switched to."""
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=target_layers(transformer, names))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        transformer.add_adapter(config, POLICY)
    if anchor:
        with warnings.catch_warnings():  # two adapters are the intention
            warnings.filterwarnings("ignore", "Already found a `peft_config` attribute")
            transformer.add_adapter(config, ANCHOR)
        copy_adapter(transformer, POLICY, ANCHOR)
    for adapter in (POLICY, ANCHOR)[: 1 + anchor]:
        for parameter in adapter_parameters(transformer, adapter).values():
            parameter.data = parameter.data.to(dtype)
    use_adapter(transformer, POLICY)


def adapter_parameters(transformer: nn.Module, adapter: str) -> dict[str, nn.Parameter]:
    """The parameters of one adapter by name, the adapter's name left out: two adapters have equal keys."""
    part = f".{adapter}."
    return {name.replace(part, "."): p for name, p in transformer.named_parameters() if part in name and "lora_" in name}


def use_adapter(transformer: HunyuanVideo15Transformer3DModel, adapter: str) -> None:
    """Switch the forward to one adapter. Only the policy's ever requires gradients."""
    transformer.set_adapter(adapter)
    for name in (POLICY, ANCHOR):
        for parameter in adapter_parameters(transformer, name).values():
            parameter.requires_grad_(name == POLICY)


@torch.no_grad()
def copy_adapter(transformer: nn.Module, source: str, target: str) -> None:
    values: dict[str, Tensor] = dict(adapter_parameters(transformer, source))
    for name, parameter in adapter_parameters(transformer, target).items():
        parameter.copy_(values[name])


@torch.no_grad()
def load_adapter(transformer: nn.Module, folder: Path, adapter: str) -> None:
    """Fill an adapter from a saved one of the same rank and layers."""
    file = folder / LORA_FILE
    if not file.is_file():
        raise FileNotFoundError(f"pretrained_lora_path {folder} has no {LORA_FILE}")
    values = {name.removeprefix("transformer."): value for name, value in load_file(file).items()}
    mine = adapter_parameters(transformer, adapter)
    wrong = sorted(set(values) ^ set(mine)) or [n for n, p in mine.items() if p.shape != values[n].shape]
    if wrong:
        raise ValueError(f"{file} does not fit lora_r and lora_target_modules: {wrong[0]} differs")
    for name, parameter in mine.items():
        parameter.copy_(values[name])
