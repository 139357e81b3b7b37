"""Which parameters are trained, one optimizer step on them (clip, warm up, average), and the anchor behind them."""

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from sage_grpo.config.fields import Config
from sage_grpo.models.backbone import Backbone
from sage_grpo.models.denoiser import Denoiser
from sage_grpo.models.lora import adapter_parameters
from sage_grpo.parallel.fsdp import copy_into, full_tensor, local_shard, replaced, shard_like


def trainable_parameters(transformer: Denoiser, use_lora: bool) -> dict[str, nn.Parameter]:
    """The adapter's parameters, or all parameters the forward uses; everything else is frozen."""
    if use_lora:
        chosen = adapter_parameters(transformer)
    else:
        unused = transformer.never_trained
        chosen = {
            name: p for name, p in transformer.named_parameters() if not name.startswith(unused)
        }
    transformer.requires_grad_(False)
    for parameter in chosen.values():
        parameter.requires_grad_(True)
    return chosen


class Optimization:
    """AdamW, or Muon for the 2-D weights of the blocks and AdamW for the rest; warm-up, clipping, averaged weights."""

    def __init__(
        self, transformer: Denoiser, parameters: Mapping[str, nn.Parameter], config: Config
    ) -> None:
        """parameters: the transformer's trained parameters."""
        self.parameters, self.config, self.updates = dict(parameters), config, 0
        self.skipped, self.skipped_in_a_row = 0, 0  # updates; in a row, those that were not finite
        shared = {
            "lr": config.learning_rate,
            "weight_decay": config.weight_decay,
            "eps": config.adam_eps,
        }
        matrices = {
            name: p for name, p in parameters.items() if transformer.is_block_matrix(name, p)
        }
        muon = matrices if config.optimizer == "muon" else {}
        rest = {name: p for name, p in parameters.items() if name not in muon}
        self.optimizers: list[torch.optim.Optimizer] = []
        if rest:
            fused = next(
                iter(rest.values())
            ).is_cuda  # the non-fused one makes a copy of all parameters
            self.optimizers.append(
                torch.optim.AdamW(list(rest.items()), fused=fused or None, **shared)
            )
        if muon:  # scaled so that both use one learning rate
            self.optimizers.append(
                torch.optim.Muon(list(muon.items()), adjust_lr_fn="match_rms_adamw", **shared)
            )
        self.average = (
            {n: p.detach().clone() for n, p in parameters.items()} if config.ema_decay else {}
        )
        self.old = (
            {n: p.detach().clone() for n, p in parameters.items()} if config.lags else {}
        )  # it samples

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        warmup = self.config.warmup_steps
        return self.config.learning_rate * (
            min(1.0, (self.updates + 1) / warmup) if warmup else 1.0
        )

    def clip(self) -> float:
        """Clip the gradient; returns its norm before clipping."""
        return full_tensor(
            nn.utils.clip_grad_norm_(self.parameters.values(), self.config.max_grad_norm)
        ).item()

    def rms(self, grad_norm: float) -> float:
        """RMS over all trained parameters of a gradient that had this norm before it was clipped."""
        return min(grad_norm, self.config.max_grad_norm) / math.sqrt(
            sum(p.numel() for p in self.parameters.values())
        )

    def should_step(self, grad_norm: float, has_signal: bool) -> bool:
        """Whether to take a step, else it counts as skipped. The norm is global, so all ranks decide alike.

        has_signal: some rollout has a nonzero advantage; otherwise the gradient carries no information.
        """
        if has_signal and math.isfinite(grad_norm):
            self.skipped_in_a_row = 0
            return True
        self.skipped += 1
        self.skipped_in_a_row += not math.isfinite(grad_norm)
        return False

    def step(self) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.learning_rate
            optimizer.step()
        self.updates += 1
        behind = min(self.config.nft_decay, self.config.nft_decay_growth * self.updates)
        for values, decay in ((self.average, self.config.ema_decay), (self.old, behind)):
            if pairs := [
                (local_shard(v), local_shard(self.parameters[n]).detach())
                for n, v in values.items()
            ]:
                torch._foreach_lerp_(*map(list, zip(*pairs, strict=True)), 1 - decay)

    @property
    def is_finite(self) -> bool:
        """Whether this rank's shards of the parameters have finite norms."""
        norms = torch._foreach_norm([local_shard(p).detach() for p in self.parameters.values()])
        return bool(torch.stack(norms).isfinite().all())

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def using(self, values: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        """Context in which the model uses these values, `average` or `old`; the trained ones if there are none."""
        return replaced(self.parameters, values)

    def tensors(self) -> dict[str, Tensor]:
        """The optimizers' state by parameter name, for a checkpoint."""
        states = [
            (name, held.state.get(p, {}))
            for name, p in self.parameters.items()
            for held in self.optimizers
        ]
        return {f"{name}.{key}": value for name, state in states for key, value in state.items()}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the state that `tensors` returned; for sharded tensors, this rank's shard."""
        states: dict[str, dict[str, Tensor]] = {name: {} for name in self.parameters}
        for full_name, value in tensors.items():
            name, _, key = full_name.rpartition(".")
            parameter = self.parameters[name]
            home = (
                value.clone()
                if value.ndim == 0
                else shard_like(parameter, value.to(parameter.device, copy=True))
            )
            states[name][key] = home
        for optimizer in self.optimizers:
            (group,) = groups = optimizer.state_dict()["param_groups"]
            own = dict(zip(group["params"], map(states.get, group["param_names"]), strict=True))
            optimizer.load_state_dict(
                {"state": own, "param_groups": groups}
            )  # moves fused counters to the device


class Anchor:
    """The anchor of the trust region, a frozen earlier policy, refreshed from the policy (moving) or never (fixed).

    It is a second set of values for the trained parameters, sharded across ranks as the model is. It counts optimizer
    steps: until the first one after a copy, it equals the policy.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], backbone: Backbone, config: Config
    ) -> None:
        """parameters: the policy's."""
        self.parameters, self.age = parameters, 0  # optimizer steps since the last copy
        offloaded = config.reference_mode_offload and not config.use_lora
        self.home = (
            torch.device("cpu") if offloaded else backbone.device
        )  # of values that the model does not use
        dtype = (
            None if config.use_lora else backbone.dtype
        )  # the forward's, so rounding to it changes no result
        # under the names of the parameters; a checkpoint must include them
        self.values = {
            n: local_shard(p).detach().to(self.home, dtype, copy=True)
            for n, p in parameters.items()
        }
        # optimizer steps between refreshes; None for a fixed anchor
        self.refresh_every = (
            config.update_ref_model_step if config.trust_region.anchor == "moving" else None
        )

    def in_place(self) -> AbstractContextManager[None]:
        """Context in which the model runs with the anchor's values."""
        return replaced(self.parameters, self.values, self.home)

    def refresh_if_due(self) -> None:
        """Called between iterations: copy the policy once enough optimizer steps have passed."""
        if self.refresh_every is not None and self.age >= self.refresh_every:
            copy_into(self.values, self.parameters)
            self.age = 0
