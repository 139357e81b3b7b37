"""The anchor of the trust region: a frozen earlier policy."""

from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch
from torch import nn

from sage_grpo.config.fields import Config
from sage_grpo.models.backbone import Backbone
from sage_grpo.parallel.fsdp import copy_into, local_shard, replaced


class Anchor:
    """Refreshed from the policy every `update_ref_model_step` optimizer steps (moving), or never (fixed).

    It is a second set of values for the trained parameters, sharded across ranks as the model is. Until the first
    optimizer step after a copy, it equals the policy.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], backbone: Backbone, config: Config
    ) -> None:
        """parameters: the policy's."""
        self.parameters = parameters
        self.age = 0  # optimizer steps since the last copy
        # optimizer steps between refreshes; None for a fixed anchor
        self.refresh_every: int | None = None
        if config.trust_region.anchor == "moving":
            self.refresh_every = config.update_ref_model_step

        # where values are that the model does not use: the anchor's, or the policy's while the anchor is active
        offloaded = config.reference_mode_offload and not config.use_lora
        self.storage_device = torch.device("cpu") if offloaded else backbone.device
        # the precision of the forward, so that rounding to it changes no result
        dtype = None if config.use_lora else backbone.dtype
        # by parameter name; a checkpoint must include them
        self.values = {
            name: local_shard(parameter).detach().to(self.storage_device, dtype, copy=True)
            for name, parameter in parameters.items()
        }

    def active(self) -> AbstractContextManager[None]:
        """Context in which the model runs with the anchor's values."""
        return replaced(self.parameters, self.values, self.storage_device)

    def refresh_if_due(self) -> None:
        """Called between iterations: copy the policy once enough optimizer steps have passed."""
        if self.refresh_every is not None and self.age >= self.refresh_every:
            copy_into(self.values, self.parameters)
            self.age = 0
