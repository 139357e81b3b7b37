"""The state of training: everything that an iteration changes and a checkpoint holds."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sage_grpo.algo.trust_region import KLController
from sage_grpo.files.tensor_files import all_finite
from sage_grpo.parallel.fsdp import local_shard, rows
from sage_grpo.train.anchor import Anchor
from sage_grpo.train.optimization import Optimization

COUNTERS = ("updates", "skipped", "skipped_in_a_row")  # of the optimization


@dataclass(eq=False)
class TrainState:
    """Weights, optimizer, averages, anchor, KL controller and position.

    Every random draw is a function of (seed, iteration, prompt, sample), so `step` is also the position in the prompts
    and in the noise; no random state is kept.
    """

    optimization: Optimization  # trained weights, optimizer, averaged weights, old policy, counters
    anchor: Anchor | None
    controller: KLController
    gradient_accumulation_steps: int = 1
    step: int = 0  # completed iterations

    @property
    def settled_step(self) -> int:
        """The last iteration whose gradients are in the weights; rollouts still accumulating are redone on resume."""
        return self.step - self.step % self.gradient_accumulation_steps

    @property
    def is_good(self) -> bool:
        """Whether the last gradients were finite."""
        return self.optimization.skipped_in_a_row == 0

    def tensors(self) -> dict[str, Mapping[str, Tensor]]:
        """Tensors that training changes and that cannot be recomputed, by part and parameter name."""
        return {
            "weights": self.optimization.parameters,
            "optimizer": self.optimization.tensors(),
            "anchor": self.anchor.values if self.anchor else {},
            "average": self.optimization.average,
            "old_policy": self.optimization.old_policy,
        }

    def shards(self) -> dict[str, Tensor]:
        """This rank's shards of the tensors, named PART/NAME."""
        return {
            f"{part}/{name}": local_shard(value.detach())
            for part, values in self.tensors().items()
            for name, value in values.items()
        }

    def rows(self, part: str, name: str) -> tuple[int, int | None]:
        """Which rows of a tensor are on this rank: those of its parameter, or all of an optimizer's counter."""
        parameter_name = name
        if part == "optimizer":
            parameter_name, _, key = name.rpartition(".")
            if key == "step":
                return 0, None
        return rows(self.optimization.parameters[parameter_name])

    def first_nonfinite(self) -> str:
        """The first tensor on this rank that is not finite, as PART/NAME; empty if there is none."""
        for name, value in self.shards().items():
            if not all_finite(value):
                return name
        return ""

    def numbers(self) -> dict[str, Any]:
        """Everything beside the tensors, for JSON, after the last optimizer step."""
        counters = {name: getattr(self.optimization, name) for name in COUNTERS}
        return {
            "step": self.settled_step,
            "anchor_age": self.anchor.age if self.anchor else None,
            **counters,
            "controller": self.controller.state_dict(),
        }

    def load_numbers(self, numbers: Mapping[str, Any]) -> None:
        """Restore what `numbers` returned."""
        self.step = numbers["step"]
        for name in COUNTERS:
            setattr(self.optimization, name, numbers[name])
        self.controller.load_state_dict(numbers["controller"])
        if self.anchor:
            self.anchor.age = numbers["anchor_age"]
