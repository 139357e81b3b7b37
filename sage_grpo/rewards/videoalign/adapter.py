"""LoRA on VideoAlign's language model: its linear layers, as VideoAlign's authors train it; the vision model stays."""

import hashlib

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import nn

NAME = "taste"  # the adapter's name in peft
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def add_adapter(model: nn.Module, rank: int, seed: int) -> dict[str, nn.Parameter]:
    """Add an adapter that changes nothing yet to a Qwen2-VL; returns its parameters, fp32, by name.

    Its scale is 2 (alpha is twice the rank), VideoAlign's own.
    """
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(LAYERS))
    with torch.random.fork_rng([]):
        inject_adapter_in_model(config, model.language_model, NAME)
    parameters = {}
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data = initial(name, parameter, seed).to(parameter.device)
            parameters[name] = parameter
    return parameters


def adapter_size(model: nn.Module, rank: int) -> int:
    """Parameters that an adapter would have."""
    size = 0
    for name, module in model.language_model.named_modules():
        if isinstance(module, nn.Linear) and name.endswith(LAYERS):
            size += rank * (module.in_features + module.out_features)
    return size


def initial(name: str, parameter: nn.Parameter, seed: int) -> torch.Tensor:
    """B is zero, A is uniform, as in the LoRA paper's code; each follows from seed and name."""
    if ".lora_B." in name:
        return torch.zeros(parameter.shape)
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7]))
    bound = parameter.shape[1] ** -0.5
    return torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator)


@torch.no_grad()
def merge_adapter(model: nn.Module, dtype: torch.dtype) -> None:
    """W <- W + 2 B A, added in fp32 and rounded to `dtype`, the precision of the file; the adapter is removed."""
    for name, module in list(model.named_modules()):
        if not isinstance(module, LoraLayer):
            continue
        layer = module.get_base_layer()
        change = module.lora_B[NAME].weight.float() @ module.lora_A[NAME].weight.float()
        merged = layer.weight.float() + module.scaling[NAME] * change
        layer.weight.copy_(merged.to(dtype))
        model.set_submodule(name, layer)
