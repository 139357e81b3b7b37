"""LoRA adapters in a transformer: the policy's, and a second one for the anchor. Only the policy's is trained."""

import hashlib
import json
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import HunyuanVideo15Transformer3DModel
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from peft import LoraConfig
from safetensors.torch import save_file
from torch import Tensor, nn

from sage_grpo.models.weights import Weights, open_safetensors
from sage_grpo.parallel.fsdp import local, rows, whole

LORA_FILE = "pytorch_lora_weights.safetensors"
POLICY, ANCHOR = "policy", "anchor"
PREFIX = "transformer."
# what a saved adapter may say: what decides its forward, and what is without effect once its weights are there
SETTINGS = ("r", "lora_alpha", "target_modules", "rank_pattern", "alpha_pattern", "use_rslora")
UNUSED = ("peft_type", "peft_version", "task_type", "base_model_name_or_path", "revision", "auto_mapping")
UNUSED += ("inference_mode", "init_lora_weights", "lora_dropout")


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
    device = transformer.device
    drawn = [device] if device.type == "cuda" else []
    for adapter in (POLICY, ANCHOR)[: 1 + anchor]:
        with warnings.catch_warnings(), torch.random.fork_rng(drawn), torch.device(device):
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


def save_adapter(transformer: HunyuanVideo15Transformer3DModel, adapter: str, folder: Path | None) -> None:
    """Write an adapter as diffusers does. All ranks of a sharded model call; those without a folder only take part."""
    tensors = {n: whole(p.detach()).cpu() for n, p in adapter_parameters(transformer, adapter).items()}
    if folder is not None:
        config = {
            k: sorted(v) if isinstance(v, set) else v for k, v in transformer.peft_config[adapter].to_dict().items()
        }
        metadata = {"format": "pt", LORA_ADAPTER_METADATA_KEY: json.dumps(config, indent=2, sort_keys=True)}
        save_file(tensors, folder / LORA_FILE, metadata=metadata)


def read_adapter(file: Path) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """Tensors and settings of a saved adapter; pipelines write both with a prefix, models without.

    Of the settings, which peft would follow wherever they lead, only those are taken that a plain LoRA has.
    """
    with open_safetensors(file) as stored:
        tensors = {name.removeprefix(PREFIX): stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        text = (stored.metadata() or {}).get(LORA_ADAPTER_METADATA_KEY)
    if text is None:
        return tensors, None
    try:
        settings = {name.removeprefix(PREFIX): value for name, value in json.loads(text).items()}
    except (ValueError, RecursionError, AttributeError) as error:
        raise ValueError(f"{file} has settings that are no JSON object ({error}); save it again") from error
    plain = LoraConfig().to_dict()
    strange = [n for n, value in settings.items() if n not in SETTINGS + UNUSED and value and value != plain.get(n)]
    if strange:
        raise ValueError(f"{file} is no plain LoRA: its settings name {strange[0]!r}; merge it into the weights")
    return tensors, {name: settings[name] for name in SETTINGS if name in settings}


@torch.no_grad()
def load_adapter(transformer: nn.Module, folder: Path, adapter: str) -> None:
    """Fill an adapter from a saved one of the same rank and layers."""
    file = folder / LORA_FILE
    values, _ = read_adapter(file)
    mine = adapter_parameters(transformer, adapter)
    wrong = sorted(set(values) ^ set(mine)) or [n for n, p in mine.items() if p.shape != values[n].shape]
    if wrong:
        raise ValueError(f"{file} does not fit lora_r and lora_target_modules: {wrong[0]} differs")
    for name, parameter in mine.items():
        local(parameter).copy_(values[name][slice(*rows(parameter))])


def merged(weights: Weights, file: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a transformer, one at a time, `alpha / r * B A` of a saved adapter added; their dtype stays."""
    adapter, config = read_adapter(file)
    if not config or not {"lora_alpha", "r"} <= config.keys() or any(config.get(name) for name in SETTINGS[3:]):
        raise ValueError(f"{file} does not tell one rank and one scale for all layers; merge it by other means")
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
