"""The anchor of the trust region: a frozen earlier policy.

With LoRA it is a second adapter in the same model; otherwise a second set of values for the trained parameters,
sharded across ranks as the model is. It is refreshed from the policy (moving) or never (fixed).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from sage_grpo.config import Config
from sage_grpo.models.backbone import Backbone
from sage_grpo.models.denoiser import Denoiser
from sage_grpo.models.lora import ANCHOR, POLICY, adapter_parameters, use_adapter
from sage_grpo.parallel.fsdp import copy_into, local_shard, replaced


@dataclass(eq=False)
class Anchor:
    """Counts optimizer steps: until the first one after a copy, the anchor equals the policy."""

    parameters: Mapping[str, nn.Parameter]  # the policy's
    values: Mapping[str, Tensor]  # the anchor's, under the same names, which a checkpoint must include
    in_place: Callable[[], AbstractContextManager[None]]  # context in which the model runs with the anchor's values
    refresh_every: int | None  # optimizer steps between refreshes; None for a fixed anchor
    age: int = 0  # optimizer steps since the last copy

    @property
    def is_policy(self) -> bool:
        return self.age == 0

    def refresh_if_due(self) -> None:
        """Called between iterations: copy the policy once enough optimizer steps have passed."""
        if self.refresh_every is not None and self.age >= self.refresh_every:
            copy_into(self.values, self.parameters)
            self.age = 0


def build_anchor(backbone: Backbone, config: Config, parameters: Mapping[str, nn.Parameter]) -> Anchor | None:
    """The anchor of the policy that has these parameters; None if the trust region needs none."""
    kind = config.trust_region.anchor
    if kind is None:
        return None
    every = config.update_ref_model_step if kind == "moving" else None
    if config.use_lora:
        values = adapter_parameters(backbone.transformer, ANCHOR)
        return Anchor(parameters, values, partial(anchor_adapter, backbone.transformer), every)
    home = torch.device("cpu") if config.reference_mode_offload else backbone.device
    # in the forward's precision, so rounding them changes no result
    values = {n: local_shard(p).detach().to(home, backbone.dtype, copy=True) for n, p in parameters.items()}
    return Anchor(parameters, values, partial(replaced, parameters, values, home), every)


@contextmanager
def anchor_adapter(transformer: Denoiser) -> Iterator[None]:
    """Context in which the forward uses the anchor's adapter instead of the policy's."""
    use_adapter(transformer, ANCHOR)
    try:
        yield
    finally:
        use_adapter(transformer, POLICY)
