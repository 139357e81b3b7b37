"""The LoRA adapter of a transformer: adding, initializing, saving and loading it."""

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
from sage_grpo.models.denoiser import TRANSFORMER, Denoiser
from sage_grpo.models.weights import open_safetensors
from sage_grpo.parallel.fsdp import full_tensor, local_shard, rows

LORA_FILE = "pytorch_lora_weights.safetensors"
# the file of each transformer's adapter, by the transformer's folder
LORA_FILES = {
    TRANSFORMER: LORA_FILE,
    "transformer_2": "pytorch_lora_weights_2.safetensors",
}
EXPERTS = ("high", "low")  # noise levels, in the order of a model's transformers
POLICY = "policy"  # the adapter's name in peft
PREFIX = "transformer."  # of tensors and settings in files that pipelines save

# Settings of a saved adapter that affect its forward, and their types.
KINDS = {"r": int, "lora_alpha": float, "use_rslora": bool}
# Settings that may have any value, because they have no effect once the adapter is loaded.
HARMLESS = (
    "target_modules",
    "peft_type",
    "peft_version",
    "task_type",
    "base_model_name_or_path",
    "revision",
    "auto_mapping",
    "inference_mode",
    "init_lora_weights",
    "lora_dropout",
)


def adapted_experts(transformer: Denoiser, which: str) -> list[Denoiser]:
    """The transformers that get an adapter: that of `high` or of `low` noise levels, or `both`; a single one always."""
    experts = list(transformer.experts.values())
    if which == "both" or len(experts) == 1:
        return experts
    return [experts[EXPERTS.index(which)]]


def target_layers(transformer: Denoiser, names: Sequence[str]) -> list[str]:
    """Full names of the linear layers in the blocks whose names end in one of `names`."""
    layers = [
        name
        for name, module in transformer.named_modules()
        if isinstance(module, nn.Linear) and name.startswith(f"{transformer.block_list}.")
    ]
    for name in names:
        if not any(layer.endswith(f".{name}") for layer in layers):
            known = sorted({layer.split(".", 2)[2].removeprefix("attn.") for layer in layers})
            raise ValueError(
                f"lora_target_modules names {name}; linear layers of the blocks are {', '.join(known)}"
            )

    suffixes = tuple(f".{name}" for name in names)
    return [
        layer
        for layer in layers
        if layer.endswith(suffixes) and not layer.startswith(transformer.never_trained)
    ]


def add_adapter(
    transformer: Denoiser, rank: int, alpha: float, layers: Sequence[str], dtype: torch.dtype
) -> None:
    """Add the layers of an adapter, on the transformer's device. `init_adapter` or `load_adapter` fills them."""
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=target_layers(transformer, layers))
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
        tensor_seed = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7])
        generator = torch.Generator().manual_seed(tensor_seed)
        bound = parameter.shape[1] ** -0.5
        values = torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator)
        _copy_rows(parameter, values)


def _copy_rows(parameter: nn.Parameter, values: Tensor) -> None:
    """Copy this rank's rows of a full tensor into its shard of a parameter."""
    start, stop = rows(parameter)
    local_shard(parameter).copy_(values[start:stop])


def adapter_parameters(transformer: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of the adapter, with its name removed from the keys."""
    infix = f".{POLICY}."
    return {
        name.replace(infix, "."): parameter
        for name, parameter in transformer.named_parameters()
        if infix in name and "lora_" in name
    }


def base_names(transformer: nn.Module) -> list[str]:
    """Names of the parameters without those of an adapter, as they are without one."""
    return [
        name.replace(".base_layer.", ".")
        for name, _ in transformer.named_parameters()
        if ".lora_" not in name
    ]


def saved_adapters(folder: Path) -> dict[str, Path]:
    """The files of a saved adapter, by the folder of the transformer that each of them is for; empty without any."""
    files = {name: folder / file for name, file in LORA_FILES.items()}
    return {name: file for name, file in files.items() if file.is_file()}


def adapter_files(transformer: Denoiser) -> dict[str, TensorFile]:
    """Copies of the adapters of all transformers that have one, by file name. All ranks of a sharded model call."""
    return {
        LORA_FILES[name]: adapter_file(expert)
        for name, expert in transformer.experts.items()
        if adapter_parameters(expert)
    }


def adapter_file(transformer: Denoiser) -> TensorFile:
    """A copy of the adapter as diffusers' pipelines save it, on the host. All ranks of a sharded model must call."""
    tensors = {
        f"{PREFIX}{name}": host_copy(full_tensor(parameter))
        for name, parameter in adapter_parameters(transformer).items()
    }
    settings = {
        f"{PREFIX}{name}": sorted(value) if isinstance(value, set) else value
        for name, value in transformer.peft_config[POLICY].to_dict().items()
    }
    metadata = {
        "format": "pt",
        LORA_ADAPTER_METADATA_KEY: json.dumps(settings, indent=2, sort_keys=True),
    }
    return TensorFile(tensors, metadata)


def read_adapter(file: Path) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """Tensors and settings of a saved adapter, without the prefix of pipelines; settings are None if it has none.

    Only the settings of a plain LoRA are accepted: peft would follow others wherever they lead.
    """
    stored = open_safetensors(file)
    tensors = {name.removeprefix(PREFIX): tensor for name, tensor in stored.tensors.items()}
    layer_ranks = _layer_ranks(file, tensors)
    text = stored.metadata.get(LORA_ADAPTER_METADATA_KEY)
    if text is None:
        return tensors, None

    try:
        settings = {name.removeprefix(PREFIX): value for name, value in json.loads(text).items()}
    except (ValueError, RecursionError, AttributeError) as error:
        raise ValueError(
            f"{file} has settings that are not a JSON object ({error}); save it again"
        ) from error

    defaults = LoraConfig().to_dict()
    for name, value in settings.items():
        if name in KINDS or name in HARMLESS:
            continue
        if value and value != defaults.get(name):
            raise ValueError(
                f"{file} is not a plain LoRA: its settings name {name!r}; merge it into the weights"
            )

    settings = {name: settings.get(name, defaults[name]) for name in KINDS}
    check_kinds(file, settings, KINDS)
    if set(layer_ranks.values()) != {settings["r"]}:  # peft would allocate r before it compares
        raise ValueError(
            f"{file} has r {settings['r']}, but tensors of rank {max(layer_ranks.values())}; save it again"
        )
    return tensors, settings | {"target_modules": sorted(layer_ranks)}


def read_scaled_adapter(file: Path) -> tuple[dict[str, Tensor], float]:
    """Tensors of a saved adapter as `read_adapter` gives them, and the alpha / r that multiplies every B A."""
    tensors, settings = read_adapter(file)
    if not settings or settings["use_rslora"]:
        raise ValueError(
            f"{file} does not have one rank and one scale for all layers; merge it by other means"
        )
    return tensors, settings["lora_alpha"] / settings["r"]


def _layer_ranks(file: Path, tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The rank of each layer's pair of matrices, (rank, in) and (out, rank). Anything but such pairs is rejected.

    So are layer names with special characters: diffusers and peft treat them as regular expressions, which can run
    forever.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    layers = dict.fromkeys(name.rpartition(".lora_")[0] for name in tensors)
    layer_ranks = {}
    problems = []
    for layer in layers:
        a = shapes.pop(f"{layer}.lora_A.weight", ())
        b = shapes.pop(f"{layer}.lora_B.weight", ())
        if len(a) == len(b) == 2 and a[0] == b[1] > 0:
            layer_ranks[layer] = a[0]
        else:
            problems.append(layer)

    problems += shapes  # tensors that belong to no pair
    if not tensors:
        problems.append("any layer")
    if problems:
        raise ValueError(
            f"{file} has no lora_A and lora_B of one rank for {problems[0]!r:.100}; save it again"
        )

    for layer in layers:
        if not re.fullmatch(r"[\w.]{1,200}", layer):
            raise ValueError(
                f"{file} names {layer!r:.100}, which is not the name of a layer; save it again"
            )
    return layer_ranks


def load_adapter(transformer: Denoiser, folder: Path) -> None:
    """Fill the adapters of all transformers that have one from saved ones; those of other transformers are an error."""
    files = saved_adapters(folder)
    adapted = {
        name: expert for name, expert in transformer.experts.items() if adapter_parameters(expert)
    }
    if files.keys() != adapted.keys():
        saved = " and ".join(files) or "no transformer"
        remedy = "give the lora_experts that it was trained with"
        if len(transformer.experts) == 1:
            remedy = "use an adapter of a model with one transformer"
        raise ValueError(
            f"{folder} has an adapter of {saved}, but this run adapts {' and '.join(adapted)}; {remedy}"
        )
    for name, expert in adapted.items():
        _load_file(expert, files[name])


@torch.no_grad()
def _load_file(transformer: nn.Module, file: Path) -> None:
    """Fill the adapter from a saved one with the same rank, scale and layers."""
    tensors, settings = read_adapter(file)
    parameters = adapter_parameters(transformer)

    differing = sorted(set(tensors) ^ set(parameters))
    if not differing:
        differing = [
            name for name, value in parameters.items() if value.shape != tensors[name].shape
        ]
    if differing:
        raise ValueError(
            f"{file} does not fit lora_r and lora_target_modules: {differing[0]} differs"
        )

    config = transformer.peft_config[POLICY]
    if settings is None:
        settings = {"lora_alpha": config.r}  # what diffusers assumes: scale 1
    for name in KINDS:
        expected = getattr(config, name)
        value = settings.get(name, expected)
        if value != expected:
            raise ValueError(
                f"{file} has {name} {value}, but lora_r and lora_alpha make it {expected}: an adapter with another "
                "scale is another model; pass the flags that it was trained with"
            )

    for name, parameter in parameters.items():
        _copy_rows(parameter, tensors[name])
