"""Estimates a run's memory, time and checkpoints before it starts, without its weights.

    python -m sage_grpo.tools.plan --config FILE.yaml --gpus N --gpu_memory GB [--FLAG VALUE ...]
    ... --vary num_frames 49 81 121        one line per value of a flag (or of gpus) instead

Takes every flag of post_train.py. A model folder that does not exist stands for the full-size model. Exit code 0: the
run fits; 1: it does not, and remedies are printed; 2: the configuration cannot run.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import lru_cache, reduce
from itertools import accumulate
from pathlib import Path
from typing import Any

from sage_grpo.config import Config, resolve
from sage_grpo.flags import answer_early, answering, from_values
from sage_grpo.tools.options import ToolParser


def options_of(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, Config]:
    """Parse this tool's flags; all others go to post_train.py's parser."""
    options, config = ToolParser("plan", __doc__).parse_with_config(arguments)
    options.gpus = options.gpus or config.gpus or 1
    return options, config


answer_early(__name__, options_of)

from sage_grpo.models import open_backbone
from sage_grpo.models.backbone import Backbone
from sage_grpo.models.cost import Architecture
from sage_grpo.models.lora import target_layers
from sage_grpo.tools.plan_memory import checkpoint_bytes, disk_bytes, export_bytes, fits, memory, peak, snapshot_bytes
from sage_grpo.tools.plan_model import Calibration, Plan, Trained, times, validation_time, volumes
from sage_grpo.tools.templating import render
from sage_grpo.train.build import held_out_prompts, reward_names
from sage_grpo.train.optimization import trainable_parameters
from sage_grpo.train.validation import validation_sampling

GB = 1e9  # bytes
# what the templates compute of a plan
SHOWN = {of.__name__: of for of in (memory, peak, fits, times, volumes, export_bytes, disk_bytes, snapshot_bytes)}
SHOWN |= {of.__name__: of for of in (checkpoint_bytes, validation_time, validation_sampling)}
Remedy = tuple[str, Any, str]
# What to trade for memory, cheapest first: a flag, its new value, and the cost.
REMEDIES: list[Remedy] = json.loads(Path(__file__).with_name("templates").joinpath("remedies.json").read_text())


@lru_cache
def backbone_of(folder: str, version: str) -> Backbone:
    """A folder's backbone without weights; if there is no folder, the published model that the version names."""
    return open_backbone(folder, version=version, complete=False)


@lru_cache
def sizes_of(backbone: Backbone, lora: tuple[int, tuple[str, ...]] | None) -> tuple[Architecture, Trained]:
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
    return Plan(replace(c, reward_model=reward_names(c)), *sizes, gpus, text_tokens, Calibration(card))


def remedies(plan: Plan, gpu_bytes: float) -> list[tuple[str, str, Plan]]:
    """A minimal set of changes that makes the plan fit; or all that help, if they are not enough."""
    chosen, reached = [], plan
    for remedy in REMEDIES:
        while not fits(reached, gpu_bytes) and (other := changed(reached, remedy)) is not reached:
            reached = other
            chosen.append(remedy)
    for remedy in REMEDIES:
        rest = [other for other in chosen if other is not remedy]
        if fits(reduce(changed, rest, plan), gpu_bytes):
            chosen = rest
    _, *plans = accumulate(chosen, changed, initial=plan)
    found = zip(chosen, plans, strict=True)
    return [(f"--{name} {getattr(after.config, name)}", price, after) for (name, _, price), after in found]


def changed(plan: Plan, remedy: Remedy) -> Plan:
    """The plan with another value of a flag; as it was if that saves nothing or cannot run."""
    (name, value, _), c = remedy, plan.config
    relative = {"twice the ranks": 2 * c.sp_size, "half the frames": c.num_frames // 8 * 4 + 1}
    try:
        other = plan_of(replace(c, **{name: relative.get(value, value)}), plan.gpus, plan.text_tokens, plan.rates.card)
    except ValueError:  # a layout that does not divide
        return plan
    return other if peak(other)[1] < peak(plan)[1] else plan


@answering("plan: ")
def main(arguments: Sequence[str] | None = None) -> int:
    options, config = options_of(arguments)
    gpu_bytes, assumed = options.gpu_memory * GB, (options.text_tokens, options.gpu)
    if options.vary:
        name, *values = options.vary
        configs = {value: from_values(asdict(config), {name.replace("-", "_"): value}) for value in values}
        gpus = {value: c.gpus if name == "gpus" else options.gpus for value, c in configs.items()}
        rows = [(value, plan_of(c, gpus[value], *assumed)) for value, c in configs.items()]
        print(render("plan_vary.txt", **SHOWN, rows=rows, name=name, gpu_bytes=gpu_bytes).rstrip())
        return 0
    plan = plan_of(config, options.gpus, *assumed)
    exists, clips = Path(plan.config.pretrained_model_root).is_dir(), len(held_out_prompts(plan.config))
    about = {"plan": plan, "exists": exists, "clips": clips, "remedies": remedies(plan, gpu_bytes)}
    print(render("plan.txt", **SHOWN, **about, price=options.price, gpu_bytes=gpu_bytes).rstrip())
    return 0 if fits(plan, gpu_bytes) else 1


if __name__ == "__main__":
    sys.exit(main())
