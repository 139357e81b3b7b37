"""LoRA adapters in a transformer: the policy's, and a second one for the anchor. Only the policy's is trained."""

import hashlib
import json
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from diffusers import HunyuanVideo15Transformer3DModel
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from peft import LoraConfig
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sage_grpo.models.weights import Weights
from sage_grpo.parallel.fsdp import local, rows, whole

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
    dtype: torch.dtype,
    anchor: bool,
) -> None:
    """Layers for a policy adapter, and with `anchor` for a second one, on the transformer's device."""
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=target_layers(transformer, names))
    for adapter in (POLICY, ANCHOR)[: 1 + anchor]:
        with warnings.catch_warnings(), torch.random.fork_rng(), torch.device(transformer.device):
            warnings.filterwarnings("ignore", "Already found a `peft_config` attribute")  # two are the intention
            transformer.add_adapter(config, adapter)
        for parameter in adapter_parameters(transformer, adapter).values():
            parameter.data = parameter.data.to(dtype)
    use_adapter(transformer, POLICY)


@torch.no_grad()
def init_adapters(transformer: nn.Module, seed: int) -> None:
    """Values of new adapters, which change nothing yet: the same for any number of ranks, and for both adapters."""
    for adapter in (POLICY, ANCHOR):
        for name, parameter in adapter_parameters(transformer, adapter).items():
            if ".lora_B." in name:
                local(parameter).zero_()
                continue
            start = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7])
            bound = parameter.shape[1] ** -0.5
            drawn = torch.empty(parameter.shape).uniform_(-bound, bound, generator=torch.Generator().manual_seed(start))
            local(parameter).copy_(drawn[slice(*rows(parameter))])


def adapter_parameters(transformer: nn.Module, adapter: str) -> dict[str, nn.Parameter]:
    """The parameters of one adapter by name, the adapter's name left out: two adapters have equal keys."""
    part = f".{adapter}."
    return {
        name.replace(part, "."): p for name, p in transformer.named_parameters() if part in name and "lora_" in name
    }


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
        local(parameter).copy_(local(values[name]))


def save_adapter(transformer: HunyuanVideo15Transformer3DModel, adapter: str, folder: Path | None) -> None:
    """Write an adapter as diffusers does. All ranks of a sharded model call; those without a folder only take part."""
    tensors = {n: whole(p.detach()).cpu() for n, p in adapter_parameters(transformer, adapter).items()}
    if folder is not None:
        config = {
            k: sorted(v) if isinstance(v, set) else v for k, v in transformer.peft_config[adapter].to_dict().items()
        }
        metadata = {"format": "pt", LORA_ADAPTER_METADATA_KEY: json.dumps(config, indent=2, sort_keys=True)}
        save_file(tensors, folder / LORA_FILE, metadata=metadata)


@torch.no_grad()
def load_adapter(transformer: nn.Module, folder: Path, adapter: str) -> None:
    """Fill an adapter from a saved one of the same rank and layers."""
    file = folder / LORA_FILE
    values = {name.removeprefix("transformer."): value for name, value in load_file(file).items()}
    mine = adapter_parameters(transformer, adapter)
    wrong = sorted(set(values) ^ set(mine)) or [n for n, p in mine.items() if p.shape != values[n].shape]
    if wrong:
        raise ValueError(f"{file} does not fit lora_r and lora_target_modules: {wrong[0]} differs")
    for name, parameter in mine.items():
        local(parameter).copy_(values[name][slice(*rows(parameter))])


def merged(weights: Weights, file: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a transformer, one at a time, `alpha / r * B A` of a saved adapter added; their dtype stays."""
    adapter = {name.removeprefix("transformer."): value for name, value in load_file(file).items()}
    with safe_open(file, "pt") as opened:
        config = json.loads(opened.metadata()[LORA_ADAPTER_METADATA_KEY])
    downs = {name.replace(".lora_A.", "."): name for name in adapter if ".lora_A." in name}
    for name, down in downs.items():
        shape = (len(adapter[down.replace(".lora_A.", ".lora_B.")]), adapter[down].shape[1])
        if name not in weights.names or weights.shape(name) != shape:
            raise ValueError(f"{file} does not fit '{weights.where}': {name} of shape {shape} is not there")
    for name in weights.names:
        value = weights.read(name)
        if name in downs:
            down, up = adapter[downs[name]], adapter[downs[name].replace(".lora_A.", ".lora_B.")]
            change = config["lora_alpha"] / config["r"] * (up.double() @ down.double())
            value = (value.double() + change).to(value.dtype)
        yield name, value
