"""From a configuration to a `Plan`: the sizes of the model are counted without its weights."""

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from sage_grpo.config.fields import Config, resolve
from sage_grpo.models.backbone import Backbone
from sage_grpo.models.cost import Architecture
from sage_grpo.models.lora import adapted_experts, target_layers
from sage_grpo.models.registry import open_backbone
from sage_grpo.tools.plan.calibration import MEASURED_ON, Calibration, calibrate
from sage_grpo.tools.plan.model import Plan, TrainedParameters
from sage_grpo.train.inputs import reward_folder, reward_names
from sage_grpo.train.optimization import trainable_parameters


def plan_of(
    config: Config, gpus: int, text_tokens: int = 150, gpu_model: str = MEASURED_ON
) -> Plan:
    """Plan a run with `gpus` processes. A model folder that does not exist stands for the full-size model."""
    backbone = backbone_of(config.pretrained_model_root, config.pretrained_transformer_version)
    config = resolve(config, backbone, "cuda")
    config = replace(config, reward_model=reward_names(config))
    lora = None
    if config.use_lora:
        lora = (config.lora_r, config.lora_target_modules, config.lora_experts)
    architecture, trained = sizes_of(backbone, lora)
    return Plan(
        config=config,
        model=architecture,
        trained=trained,
        gpus=gpus,
        text_tokens=text_tokens,
        rates=with_local_rewards(calibrate(gpu_model), reward_folder(config)),
    )


def with_local_rewards(rates: Calibration, folder: Path) -> Calibration:
    """The rates with VideoAlign as large as in `folder`; a missing folder stands for the published model."""
    files = [file for file in folder.rglob("*") if file.suffix in (".safetensors", ".pth")]
    if not files:
        return rates
    stored_bytes = sum(file.stat().st_size for file in files)
    videoalign = rates.rewards["videoalign"].of_size(stored_bytes)
    return replace(rates, rewards={**rates.rewards, "videoalign": videoalign})


@lru_cache
def backbone_of(folder: str, version: str) -> Backbone:
    """A folder's backbone without weights; if there is no folder, the published model that the version names."""
    return open_backbone(folder, version=version, complete=False)


@lru_cache
def sizes_of(
    backbone: Backbone, lora: tuple[int, tuple[str, ...], str] | None
) -> tuple[Architecture, TrainedParameters]:
    """Count parameters on the real classes, on the meta device. `lora`: rank, layers, transformers of the adapter."""
    transformer = backbone.empty_transformer()
    if lora:
        rank, targets, experts = lora
        layers = [
            expert.get_submodule(name)
            for expert in adapted_experts(transformer, experts)
            for name in target_layers(expert, targets)
        ]
        total = sum(rank * (layer.in_features + layer.out_features) for layer in layers)
        matrices = total
    else:
        parameters = trainable_parameters(transformer, use_lora=False)
        sizes = {name: parameter.numel() for name, parameter in parameters.items()}
        total = sum(sizes.values())
        matrices = sum(
            sizes[name]
            for name, parameter in parameters.items()
            if transformer.is_block_matrix(name, parameter)
        )
    return architecture_of(backbone), TrainedParameters(total=total, matrices=matrices)


@lru_cache
def architecture_of(backbone: Backbone) -> Architecture:
    """Sizes of the whole model, trained or not."""
    return backbone.architecture()
