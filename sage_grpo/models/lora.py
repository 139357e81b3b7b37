"""LoRA adapters in a transformer: one for the policy and one for the anchor. Only the policy's is trained."""

import hashlib
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from peft import LoraConfig
from safetensors.torch import save_file
from torch import Tensor, nn

from sage_grpo.models.denoiser import Denoiser
from sage_grpo.models.weights import open_safetensors
from sage_grpo.parallel.fsdp import full_tensor, local_shard, rows

LORA_FILE = "pytorch_lora_weights.safetensors"
POLICY, ANCHOR = "policy", "anchor"
PREFIX = "transformer."
# allowed settings of a saved adapter: those that affect its forward, and those without effect once it is loaded
SETTINGS = ("r", "lora_alpha", "target_modules", "rank_pattern", "alpha_pattern", "use_rslora")
UNUSED = ("peft_type", "peft_version", "task_type", "base_model_name_or_path", "revision", "auto_mapping")
UNUSED += ("inference_mode", "init_lora_weights", "lora_dropout")


def target_layers(transformer: Denoiser, names: Sequence[str]) -> list[str]:
    """Full names of the linear layers in the blocks whose names end in one of `names`."""
    linears = [name for name, module in transformer.named_modules() if isinstance(module, nn.Linear)]
    blocks = [name for name in linears if name.startswith(f"{transformer.block_list}.")]
    missing = [name for name in names if not any(layer.endswith(f".{name}") for layer in blocks)]
    if missing:
        known = sorted({layer.split(".", 2)[2].removeprefix("attn.") for layer in blocks})
        raise ValueError(f"lora_target_modules names {missing[0]}; linear layers of the blocks are {', '.join(known)}")
    chosen = [layer for layer in blocks if any(layer.endswith(f".{name}") for name in names)]
    return [layer for layer in chosen if not layer.startswith(transformer.never_trained)]


def add_adapters(
    transformer: Denoiser,
    rank: int,
    alpha: float,
    names: Sequence[str],
    dtype: torch.dtype,
    anchor: bool,
) -> None:
    """Add layers for a policy adapter and, with `anchor`, for a second one, on the transformer's device."""
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=target_layers(transformer, names))
    device = next(transformer.parameters()).device
    drawn = [device] if device.type == "cuda" else []
    for adapter in (POLICY, ANCHOR)[: 1 + anchor]:
        with warnings.catch_warnings(), torch.random.fork_rng(drawn), torch.device(device):
            warnings.filterwarnings("ignore", "Already found a `peft_config` attribute")  # two are intended
            transformer.add_adapter(config, adapter)
        for parameter in adapter_parameters(transformer, adapter).values():
            parameter.data = parameter.data.to(dtype)
    use_adapter(transformer, POLICY)


@torch.no_grad()
def init_adapters(transformer: nn.Module, seed: int) -> None:
    """Initialize new adapters as no-ops: identical for any number of ranks and for both adapters."""
    for adapter in (POLICY, ANCHOR):
        for name, parameter in adapter_parameters(transformer, adapter).items():
            if ".lora_B." in name:
                local_shard(parameter).zero_()
                continue
            start = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7])
            bound = parameter.shape[1] ** -0.5
            drawn = torch.empty(parameter.shape).uniform_(-bound, bound, generator=torch.Generator().manual_seed(start))
            local_shard(parameter).copy_(drawn[slice(*rows(parameter))])


def adapter_parameters(transformer: nn.Module, adapter: str) -> dict[str, nn.Parameter]:
    """Parameters of one adapter, with its name removed from the keys: both adapters have equal keys."""
    part = f".{adapter}."
    return {
        name.replace(part, "."): p for name, p in transformer.named_parameters() if part in name and "lora_" in name
    }


def use_adapter(transformer: Denoiser, adapter: str) -> None:
    """Switch the forward to one adapter. Only the policy's adapter ever requires gradients."""
    transformer.set_adapter(adapter)
    for name in (POLICY, ANCHOR):
        for parameter in adapter_parameters(transformer, name).values():
            parameter.requires_grad_(name == POLICY)


def save_adapter(transformer: Denoiser, adapter: str, folder: Path | None) -> None:
    """Write an adapter in diffusers format. All ranks of a sharded model call; those without a folder only join in."""
    tensors = {n: full_tensor(p.detach()).cpu() for n, p in adapter_parameters(transformer, adapter).items()}
    if folder is not None:
        config = {
            k: sorted(v) if isinstance(v, set) else v for k, v in transformer.peft_config[adapter].to_dict().items()
        }
        metadata = {"format": "pt", LORA_ADAPTER_METADATA_KEY: json.dumps(config, indent=2, sort_keys=True)}
        save_file(tensors, folder / LORA_FILE, metadata=metadata)


def read_adapter(file: Path) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """Tensors and settings of a saved adapter; pipelines prefix both, models do not.

    Only the settings of a plain LoRA are accepted: peft would follow others wherever they lead.
    """
    with open_safetensors(file) as stored:
        tensors = {name.removeprefix(PREFIX): stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        text = (stored.metadata() or {}).get(LORA_ADAPTER_METADATA_KEY)
    if text is None:
        return tensors, None
    try:
        settings = {name.removeprefix(PREFIX): value for name, value in json.loads(text).items()}
    except (ValueError, RecursionError, AttributeError) as error:
        raise ValueError(f"{file} has settings that are not a JSON object ({error}); save it again") from error
    plain = LoraConfig().to_dict()
    strange = [n for n, value in settings.items() if n not in SETTINGS + UNUSED and value and value != plain.get(n)]
    if strange:
        raise ValueError(f"{file} is not a plain LoRA: its settings name {strange[0]!r}; merge it into the weights")
    return tensors, {name: settings[name] for name in SETTINGS if name in settings}


@torch.no_grad()
def load_adapter(transformer: nn.Module, folder: Path, adapter: str) -> None:
    """Fill an adapter from a saved one with the same rank and layers."""
    file = folder / LORA_FILE
    values, _ = read_adapter(file)
    mine = adapter_parameters(transformer, adapter)
    wrong = sorted(set(values) ^ set(mine)) or [n for n, p in mine.items() if p.shape != values[n].shape]
    if wrong:
        raise ValueError(f"{file} does not fit lora_r and lora_target_modules: {wrong[0]} differs")
    for name, parameter in mine.items():
        local_shard(parameter).copy_(values[name][slice(*rows(parameter))])
