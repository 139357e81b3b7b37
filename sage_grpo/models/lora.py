"""The LoRA adapter of a transformer."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from peft import LoraConfig
from torch import Tensor, nn

from sage_grpo.files.json_files import check_kinds
from sage_grpo.files.tensor_files import TensorFile, host_copy
from sage_grpo.models.denoiser import Denoiser
from sage_grpo.models.weights import open_safetensors
from sage_grpo.parallel.fsdp import full_tensor, local_shard, rows

LORA_FILE = "pytorch_lora_weights.safetensors"
POLICY = "policy"  # its name
PREFIX = "transformer."
# allowed settings of a saved adapter: those that affect its forward, and those without effect once it is loaded
KINDS = {"r": int, "lora_alpha": float, "use_rslora": bool}
ALLOWED = (
    *KINDS,
    "target_modules",
    "peft_type",
    "peft_version",
    "task_type",
    "base_model_name_or_path",
    "revision",
)
ALLOWED += ("auto_mapping", "inference_mode", "init_lora_weights", "lora_dropout")


def target_layers(transformer: Denoiser, names: Sequence[str]) -> list[str]:
    """Full names of the linear layers in the blocks whose names end in one of `names`."""
    linears = [
        name for name, module in transformer.named_modules() if isinstance(module, nn.Linear)
    ]
    blocks = [name for name in linears if name.startswith(f"{transformer.block_list}.")]
    if missing := [
        name for name in names if not any(layer.endswith(f".{name}") for layer in blocks)
    ]:
        known = sorted({layer.split(".", 2)[2].removeprefix("attn.") for layer in blocks})
        raise ValueError(
            f"lora_target_modules names {missing[0]}; linear layers of the blocks are {', '.join(known)}"
        )
    chosen = [layer for layer in blocks if any(layer.endswith(f".{name}") for name in names)]
    return [layer for layer in chosen if not layer.startswith(transformer.never_trained)]


def add_adapter(
    transformer: Denoiser, rank: int, alpha: float, names: Sequence[str], dtype: torch.dtype
) -> None:
    """Add the layers of an adapter, on the transformer's device."""
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=target_layers(transformer, names))
    device = next(transformer.parameters()).device
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.device(device):
        transformer.add_adapter(config, POLICY)
    for parameter in adapter_parameters(transformer).values():
        parameter.data = parameter.data.to(dtype)


@torch.no_grad()
def init_adapter(transformer: nn.Module, seed: int) -> None:
    """Initialize a new adapter as a no-op, identical for any number of ranks."""
    for name, parameter in adapter_parameters(transformer).items():
        if ".lora_B." in name:
            local_shard(parameter).zero_()
            continue
        start = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7])
        bound = parameter.shape[1] ** -0.5
        drawn = torch.empty(parameter.shape).uniform_(
            -bound, bound, generator=torch.Generator().manual_seed(start)
        )
        local_shard(parameter).copy_(drawn[slice(*rows(parameter))])


def adapter_parameters(transformer: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of the adapter, with its name removed from the keys."""
    part, named = f".{POLICY}.", transformer.named_parameters()
    return {name.replace(part, "."): p for name, p in named if part in name and "lora_" in name}


def adapter_file(transformer: Denoiser) -> TensorFile:
    """A copy of the adapter as diffusers' pipelines save it, on the host. All ranks of a sharded model must call."""
    tensors = {
        f"{PREFIX}{n}": host_copy(full_tensor(p))
        for n, p in adapter_parameters(transformer).items()
    }
    settings = transformer.peft_config[POLICY].to_dict().items()
    config = {f"{PREFIX}{k}": sorted(v) if isinstance(v, set) else v for k, v in settings}
    about = json.dumps(config, indent=2, sort_keys=True)
    return TensorFile(tensors, {"format": "pt", LORA_ADAPTER_METADATA_KEY: about})


def read_adapter(file: Path) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """Tensors and settings of a saved adapter; pipelines prefix both, models do not.

    Only the settings of a plain LoRA are accepted: peft would follow others wherever they lead.
    """
    stored = open_safetensors(file)
    tensors = {name.removeprefix(PREFIX): tensor for name, tensor in stored.tensors.items()}
    ranks, text = _ranks(file, tensors), stored.metadata.get(LORA_ADAPTER_METADATA_KEY)
    if text is None:
        return tensors, None
    try:
        settings = {name.removeprefix(PREFIX): value for name, value in json.loads(text).items()}
    except (ValueError, RecursionError, AttributeError) as error:
        raise ValueError(
            f"{file} has settings that are not a JSON object ({error}); save it again"
        ) from error
    plain = LoraConfig().to_dict()
    if strange := [
        n for n, value in settings.items() if n not in ALLOWED and value and value != plain.get(n)
    ]:
        raise ValueError(
            f"{file} is not a plain LoRA: its settings name {strange[0]!r}; merge it into the weights"
        )
    settings = {name: settings.get(name, plain[name]) for name in KINDS}
    check_kinds(file, settings, KINDS)
    if set(ranks.values()) != {settings["r"]}:  # peft would allocate it before it compares
        raise ValueError(
            f"{file} has r {settings['r']}, but tensors of rank {max(ranks.values())}; save it again"
        )
    return tensors, settings | {"target_modules": sorted(ranks)}


def _ranks(file: Path, tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The rank of each layer's pair of matrices. Anything but such pairs is rejected.

    So are names that are not plain: diffusers and peft take them as regular expressions, which can run for ever.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    layers = dict.fromkeys(name.rpartition(".lora_")[0] for name in tensors)
    pairs = {
        layer: [shapes.pop(f"{layer}.lora_{side}.weight", ()) for side in "AB"] for layer in layers
    }
    wrong = [
        n for n, (a, b) in pairs.items() if not len(a) == len(b) == 2 or a[0] != b[1] or not a[0]
    ] + list(shapes)
    if wrong or not pairs:
        raise ValueError(
            f"{file} has no lora_A and lora_B of one rank for {(wrong or ['any layer'])[0]!r:.100}"
        )
    if strange := [layer for layer in layers if not re.fullmatch(r"[\w.]{1,200}", layer)]:
        raise ValueError(
            f"{file} names {strange[0]!r:.100}, which is not the name of a layer; save it again"
        )
    return {layer: a[0] for layer, (a, _) in pairs.items()}


@torch.no_grad()
def load_adapter(transformer: nn.Module, folder: Path) -> None:
    """Fill the adapter from a saved one with the same rank, scale and layers."""
    file = folder / LORA_FILE
    values, settings = read_adapter(file)
    mine = adapter_parameters(transformer)
    if wrong := sorted(set(values) ^ set(mine)) or [
        n for n, p in mine.items() if p.shape != values[n].shape
    ]:
        raise ValueError(f"{file} does not fit lora_r and lora_target_modules: {wrong[0]} differs")
    own = transformer.peft_config[POLICY]
    settings = settings or {"lora_alpha": own.r}  # what diffusers takes if a file does not say it
    for name in KINDS:
        if (found := settings.get(name, getattr(own, name))) != getattr(own, name):
            difference = (
                f"{file} has {name} {found}, but lora_r and lora_alpha make it {getattr(own, name)}"
            )
            reason = "an adapter with another scale is another model; give the flags that it was trained with"
            raise ValueError(f"{difference}: {reason}")
    for name, parameter in mine.items():
        local_shard(parameter).copy_(values[name][slice(*rows(parameter))])
