"""The anchor of the trust region: a frozen earlier policy, and its velocities along a rollout.

With LoRA it is a second adapter in the same model, else a second set of values for the trained parameters, of which
each rank of a sharded model holds its own part. It is refreshed from the policy (moving), or never (fixed).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from sage_grpo.models.hunyuan15 import Hunyuan15
from sage_grpo.models.lora import ANCHOR, POLICY, adapter_parameters, use_adapter
from sage_grpo.parallel.fsdp import local, put, replaced


class Anchor(ABC):
    """Counts optimizer steps: while none was taken since the last copy, the anchor is the policy."""

    def __init__(self, policy: Hunyuan15, refresh_every: int | None) -> None:
        """`refresh_every`: optimizer steps between refreshes; None for an anchor that stays."""
        self.policy, self.refresh_every, self.age = policy, refresh_every, 0

    @property
    def is_policy(self) -> bool:
        return self.age == 0

    def count_update(self) -> None:
        self.age += 1

    def refresh_if_due(self) -> bool:
        """Between iterations: copy the policy once enough optimizer steps have passed."""
        if self.refresh_every is None or self.age < self.refresh_every:
            return False
        self.copy_policy()
        self.age = 0
        return True

    @abstractmethod
    def copy_policy(self) -> None:
        """Make the anchor the policy of now."""

    @abstractmethod
    def in_place(self) -> AbstractContextManager[None]:
        """Context in which the policy's forward is the anchor's."""

    @abstractmethod
    def tensors(self) -> Mapping[str, Tensor]:
        """What a checkpoint has to keep."""


class AdapterAnchor(Anchor):
    """A second adapter: a refresh is a local copy of the adapter."""

    def copy_policy(self) -> None:
        put(self.tensors(), adapter_parameters(self.policy.transformer, POLICY))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        use_adapter(self.policy.transformer, ANCHOR)
        try:
            yield
        finally:
            use_adapter(self.policy.transformer, POLICY)

    def tensors(self) -> Mapping[str, Tensor]:
        return adapter_parameters(self.policy.transformer, ANCHOR)


class FullAnchor(Anchor):
    """Values of all trained parameters, in the precision of the forward, which changes none of its numbers."""

    def __init__(
        self,
        policy: Hunyuan15,
        refresh_every: int | None,
        parameters: Mapping[str, nn.Parameter],
        dtype: torch.dtype,
        offload: bool,
    ) -> None:
        """`offload`: they wait in host memory."""
        super().__init__(policy, refresh_every)
        self.parameters, self.home = dict(parameters), torch.device("cpu") if offload else policy.device
        self.values = {n: local(p).detach().to(self.home, dtype, copy=True) for n, p in parameters.items()}

    def copy_policy(self) -> None:
        put(self.values, self.parameters)

    def in_place(self) -> AbstractContextManager[None]:
        return replaced(self.parameters, self.values, self.home)

    def tensors(self) -> Mapping[str, Tensor]:
        return self.values
