"""What a checkpoint holds for other software: the adapter or all weights, and the model card."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sage_grpo.config.fields import Config
from sage_grpo.files.json_files import printable
from sage_grpo.files.tensor_files import TensorFile
from sage_grpo.models import comfyui
from sage_grpo.models.backbone import Backbone, Origin
from sage_grpo.models.lora import adapter_parameters, base_names
from sage_grpo.parallel.ranks import Ranks
from sage_grpo.rewards.base import Composite
from sage_grpo.runs.card import model_card
from sage_grpo.runs.folder import RunFolder
from sage_grpo.runs.history import RunHistory, read_run
from sage_grpo.train.checkpoint import plain_config, read_state
from sage_grpo.train.state import TrainState
from sage_grpo.worlds.registry import world_of

# settings that a card names even if they are defaults
ALWAYS_NAMED = (
    "pretrained_model_root",
    "use_lora",
)


EMBEDDED = Origin(license="apache-2.0")


@dataclass(eq=False)
class Export:
    """Makes the files; all ranks must call."""

    backbone: Backbone
    config: Config
    ranks: Ranks
    run: RunFolder
    reward: Composite
    base_weights: str  # fingerprint of the weights that training started from

    def is_due(self, step: int) -> bool:
        """Whether the checkpoint of iteration `step` can be read by other software; one with an adapter always can."""
        c = self.config
        scheduled = bool(c.export_interval) and step % c.export_interval == 0
        return scheduled or c.use_lora or step == c.max_steps

    def files(self, state: TrainState) -> dict[str, TensorFile | str | bytes]:
        """This rank's files: averaged weights if there are any, and on the first rank the card."""
        ranks = self.ranks
        with state.optimization.using(state.optimization.average):
            files = self.backbone.exported(self.config.use_lora, ranks.world_rank, ranks.world_size)
        if ranks.is_first:
            files.update(self.card(state.settled_step))
        return files

    def card(self, step: int) -> dict[str, str | bytes]:
        """The model card, with the settings that are not defaults.

        A checkpoint is worth more than its card: what goes wrong is printed, and costs the curve or the card.
        """
        card = f"the model card of iteration {step}"
        try:
            return self._card(step, read_run(self.run.path))
        except Exception as error:
            print(f"{card} has no curve: {printable(error)}", file=sys.stderr)
        try:
            return self._card(step, RunHistory(self.run.path, [], [], []))
        except Exception as error:
            print(f"{card} is not written: {printable(error)}", file=sys.stderr)
        return {}

    def _card(self, step: int, history: RunHistory) -> dict[str, str | bytes]:
        experts = self.backbone.transformer.experts
        trained = [
            name
            for name, expert in experts.items()
            if not self.config.use_lora or adapter_parameters(expert)
        ]
        return model_card(
            recipe_of(plain_config(self.config)),
            history,
            base=self.base_weights,
            step=step,
            reward=self.reward,
            image=self.backbone.sees_image,
            comfyui=all(comfyui.has_layout(base_names(expert)) for expert in experts.values()),
            origin=origin_of(self.backbone),
            experts=trained,
            num_transformers=len(experts),
        )


def recipe_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a plain configuration that are not defaults, and those that a card always names."""
    defaults = plain_config(Config())
    return {
        name: config.get(name, default)
        for name, default in defaults.items()
        if name in ALWAYS_NAMED or config.get(name, default) != default
    }


def is_one_of_two(checkpoint: Path, adapters: Mapping[str, Path]) -> bool:
    """Whether the adapters of a checkpoint are of a model with two transformers, of which they may adapt one."""
    config = read_state(checkpoint)["config"]
    return len(adapters) > 1 or config.get("lora_experts", "both") != "both"


def origin_of(backbone: Backbone) -> Origin:
    """What a card says about the base weights; those of a world are this project's own, whatever their classes."""
    return EMBEDDED if world_of(backbone.folder) else backbone.origin
