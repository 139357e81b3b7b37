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

    def count_update(self) -> None:
        self.age += 1

    def refresh_if_due(self) -> None:
        """Called between iterations: copy the policy once enough optimizer steps have passed."""
        if self.refresh_every is not None and self.age >= self.refresh_every:
            self.copy_policy()
            self.age = 0

    def copy_policy(self) -> None:
        copy_into(self.values, self.parameters)


def adapter_anchor(transformer: Denoiser, refresh_every: int | None) -> Anchor:
    """An anchor stored as a second adapter of the model."""

    @contextmanager
    def in_place() -> Iterator[None]:
        use_adapter(transformer, ANCHOR)
        try:
            yield
        finally:
            use_adapter(transformer, POLICY)

    parameters, values = (adapter_parameters(transformer, name) for name in (POLICY, ANCHOR))
    return Anchor(parameters, values, in_place, refresh_every)


def full_anchor(
    parameters: Mapping[str, nn.Parameter], refresh_every: int | None, dtype: torch.dtype, home: torch.device
) -> Anchor:
    """An anchor stored as values on `home`, in the forward's precision, so rounding them changes no result."""
    values = {n: local_shard(p).detach().to(home, dtype, copy=True) for n, p in parameters.items()}
    return Anchor(parameters, values, partial(replaced, parameters, values, home), refresh_every)
