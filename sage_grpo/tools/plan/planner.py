"""From a configuration to a plan: the sizes of the model, counted without its weights."""

from dataclasses import replace
from functools import lru_cache

from sage_grpo.config.fields import Config, resolve
from sage_grpo.models.backbone import Backbone
from sage_grpo.models.cost import Architecture
from sage_grpo.models.lora import target_layers
from sage_grpo.models.registry import open_backbone
from sage_grpo.tools.plan.model import Calibration, Plan, Trained
from sage_grpo.train.build import reward_names
from sage_grpo.train.optimization import trainable_parameters


@lru_cache
def backbone_of(folder: str, version: str) -> Backbone:
    """A folder's backbone without weights; if there is no folder, the published model that the version names."""
    return open_backbone(folder, version=version, complete=False)


@lru_cache
def sizes_of(
    backbone: Backbone, lora: tuple[int, tuple[str, ...]] | None
) -> tuple[Architecture, Trained]:
    """Count parameters on the real classes, on the meta device. `lora`: rank and layers of the adapter."""
    transformer, model = backbone.empty_transformer(), backbone.architecture()
    if lora:
        rank, targets = lora
        layers = [transformer.get_submodule(name) for name in target_layers(transformer, targets)]
        total = sum(rank * (layer.in_features + layer.out_features) for layer in layers)
        return model, Trained(total=total, matrices=total)
    trained = trainable_parameters(transformer, False)
    matrices = [p.numel() for name, p in trained.items() if transformer.is_block_matrix(name, p)]
    return model, Trained(total=sum(p.numel() for p in trained.values()), matrices=sum(matrices))


def plan_of(config: Config, gpus: int, text_tokens: int = 150, card: str = "h200") -> Plan:
    backbone = backbone_of(config.pretrained_model_root, config.pretrained_transformer_version)
    c = resolve(config, backbone, "cuda")
    sizes = sizes_of(backbone, (c.lora_r, c.lora_target_modules) if c.use_lora else None)
    return Plan(
        replace(c, reward_model=reward_names(c)), *sizes, gpus, text_tokens, Calibration(card)
    )
