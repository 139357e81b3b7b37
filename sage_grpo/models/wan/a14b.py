"""Wan 2.2 A14B: two transformers of 14 B parameters, one for high and one for low noise levels.

Clips of a batch may lie on both sides of the boundary. Then both transformers run the whole batch, and each clip takes
the velocity of its own: a forward of the same shape as in the rollout gives the same bits.

Shapes: B clips, C latent channels, (T, y, x) latent frames, rows, columns.
"""

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from sage_grpo.files.fingerprints import files_fingerprint
from sage_grpo.models.backbone import Guidance, Origin, guided
from sage_grpo.models.latent import high_levels, model_timestep, trained_levels
from sage_grpo.models.wan.backbone import Wan
from sage_grpo.models.wan.experts import HIGH, LOW, Expert, Experts
from sage_grpo.models.wan.folder import ExpertsFolder
from sage_grpo.models.wan.text import PaddedText
from sage_grpo.models.weights import Weights, fill_model, joined


class A14b(Wan):
    """Text to video."""

    folder_class = ExpertsFolder
    transformer_class = Expert
    experts = (HIGH, LOW)

    origin = Origin("Wan-AI/Wan2.2-T2V-A14B-Diffusers", license="apache-2.0")

    @property
    def boundary(self) -> float:
        return self.parts.boundary

    # sampling

    def branch(self, x: Tensor, sigma: Tensor | float, cond: PaddedText) -> Tensor:
        return self.by_noise_level(
            x, sigma, lambda expert: self.expert_branch(expert, x, sigma, cond)
        )

    def velocity(
        self, x: Tensor, sigma: Tensor | float, cond: PaddedText, guidance: Guidance
    ) -> Tensor:
        """Guided velocity, with a guidance for each transformer."""

        def velocity_of(expert: str) -> Tensor:
            own_guidance = guidance if expert == HIGH else guidance.second
            return guided(partial(self.expert_branch, expert, x, sigma), cond, own_guidance)

        return self.by_noise_level(x, sigma, velocity_of)

    def expert_branch(
        self, expert: str, x: Tensor, sigma: Tensor | float, cond: PaddedText
    ) -> Tensor:
        """Velocity of one transformer without guidance."""
        timestep = model_timestep(sigma, x.device)
        return self.run_transformer(
            self.model_input(x, cond), timestep, cond, partial(self.transformer, expert)
        )

    def model_input(self, x: Tensor, cond: PaddedText) -> Tensor:
        """What the transformers see: the latents alone."""
        return x

    def by_noise_level(
        self, x: Tensor, sigma: Tensor | float, velocity_of: Callable[[str], Tensor]
    ) -> Tensor:
        """The velocity of each clip's own transformer, which only runs if some clip needs it."""
        is_high = high_levels(sigma, self.boundary, x.device)
        num_high = int(is_high.sum())  # read once: the host waits for the device here
        if num_high == len(is_high):
            return velocity_of(HIGH)
        if num_high == 0:
            return velocity_of(LOW)
        return torch.where(is_high.view(-1, 1, 1, 1, 1), velocity_of(HIGH), velocity_of(LOW))

    def learns_at(self, sigmas: Tensor, adapted: str = "both") -> Tensor:
        return trained_levels(sigmas, self.boundary, adapted)

    # weights

    def empty_transformer(self) -> Experts:
        high, low = (self.parts.empty(part, self.transformer_class) for part in self.experts)
        return Experts(high, low)

    def open_weights(self) -> Weights:
        parts = {part: self.parts.weights(part) for part in self.experts}
        return joined(self.folder, parts)

    @cached_property
    def transformer(self) -> Experts:
        model = self.empty_transformer().requires_grad_(False)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(self.dtype)
        self.fill_transformer(model)
        return model

    def fill_transformer(self, model: Experts, checkpoint: Path | None = None) -> None:
        if not self.takes_turns(model):
            super().fill_transformer(model, checkpoint)
            return
        model.to_empty(device="cpu")  # memory that is never written takes no time
        swap = model.take_turns(self.device)
        fill_model(model, self.starting_weights(checkpoint))
        swap.lock()
        self.transformer = model

    def takes_turns(self, model: Experts) -> bool:
        """Whether one transformer at a time is on the device: on a GPU, if the weights are frozen and not sharded."""
        frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        return bool(frozen) and self.device.type == "cuda" and not isinstance(model, FSDPModule)

    def fingerprints(self) -> dict[str, str]:
        config = self.parts.part(LOW) / "config.json"
        return super().fingerprints() | {
            "transformer_2 config": files_fingerprint([config]),
            "boundary": str(self.boundary),
        }

    def why_no_gradient(
        self, name: str, conditions: Sequence[PaddedText], levels: Sequence[float]
    ) -> str:
        expert, _, _ = name.partition(".")
        side = "high" if expert == HIGH else "low"
        if self.learns_at(torch.tensor(levels), side).any():
            return ""
        return f"of {expert} wait for a step on its side of the boundary, noise level {self.boundary:g}"
