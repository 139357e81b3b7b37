"""Which parameters are trained, and one optimizer step on them: clip, warm up, step, average."""

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from sage_grpo.config.fields import Config
from sage_grpo.models.denoiser import Denoiser
from sage_grpo.models.lora import adapter_parameters
from sage_grpo.parallel.fsdp import full_tensor, local_shard, replaced, shard_like


def trainable_parameters(transformer: Denoiser, use_lora: bool) -> dict[str, nn.Parameter]:
    """The adapter's parameters, or all parameters the forward uses; everything else is frozen."""
    if use_lora:
        trained = adapter_parameters(transformer)
    else:
        trained = {
            name: parameter
            for name, parameter in transformer.named_parameters()
            if not name.startswith(transformer.never_trained)
        }
    transformer.requires_grad_(False)
    for parameter in trained.values():
        parameter.requires_grad_(True)
    return trained


class Optimization:
    """AdamW, or Muon for the 2-D weights of the blocks and AdamW for the rest; warm-up, clipping, averaged weights."""

    def __init__(
        self, transformer: Denoiser, parameters: Mapping[str, nn.Parameter], config: Config
    ) -> None:
        """parameters: the transformer's trained parameters."""
        self.config = config
        self.parameters = dict(parameters)
        self.optimizers = build_optimizers(transformer, self.parameters, config)

        self.updates = 0
        self.skipped = 0  # updates without an advantage or with a non-finite gradient
        self.skipped_in_a_row = 0  # of these, the latest consecutive non-finite ones

        # averaged weights for validation and export, and the older policy that samples for nft
        self.average = self._wide_copy() if config.ema_decay else {}
        self.old_policy = self._wide_copy() if config.samples_with_old_policy else {}

    def _wide_copy(self) -> dict[str, Tensor]:
        """The parameters, at least in fp32: in bf16 an average never moves by less than a rounding step."""
        return {
            name: shard_like(
                parameter,
                local_shard(parameter).detach().to(_wide(parameter.dtype), copy=True),
            )
            for name, parameter in self.parameters.items()
        }

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        warmup_steps = self.config.warmup_steps
        if not warmup_steps:
            return self.config.learning_rate
        return self.config.learning_rate * min(1.0, (self.updates + 1) / warmup_steps)

    def clip(self) -> float:
        """Clip the gradient; returns its norm before clipping."""
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        norm = full_tensor(nn.utils.get_total_norm(gradients))
        factor = (self.config.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        # by shards: of sharded tensors torch would first plan each product, which takes seconds for a hundred
        for gradient in gradients:
            local_shard(gradient).mul_(factor)
        return norm.item()

    def rms(self, grad_norm: float) -> float:
        """RMS over all trained parameters of a gradient that had this norm before it was clipped."""
        count = sum(parameter.numel() for parameter in self.parameters.values())
        return min(grad_norm, self.config.max_grad_norm) / math.sqrt(count)

    def should_step(self, grad_norm: float, has_advantage: bool) -> bool:
        """Whether to take a step, else to skip it. The norm is global, so all ranks decide alike.

        has_advantage: some rollout has a nonzero advantage; otherwise the gradient carries no information.
        """
        return has_advantage and math.isfinite(grad_norm)

    def count_skip(self, grad_norm: float) -> None:
        """Count a step that is not taken."""
        self.skipped += 1
        if not math.isfinite(grad_norm):
            self.skipped_in_a_row += 1

    def step(self) -> None:
        self.skipped_in_a_row = 0
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.learning_rate
            optimizer.step()
        self.updates += 1
        self._follow(self.average, self.config.ema_decay)
        # the decay of nft's old policy grows from 0: it samples almost on-policy at first
        old_decay = min(self.config.nft_decay, self.config.nft_decay_growth * self.updates)
        self._follow(self.old_policy, old_decay)

    def _follow(self, values: Mapping[str, Tensor], decay: float) -> None:
        """Move `values` towards the parameters: decay * values + (1 - decay) * parameters."""
        if not values:
            return
        shards = [local_shard(value) for value in values.values()]
        targets = [
            local_shard(self.parameters[name]).detach().to(value.dtype)
            for name, value in values.items()
        ]
        torch._foreach_lerp_(shards, targets, 1 - decay)

    @property
    def is_finite(self) -> bool:
        """Whether this rank's shards of the parameters have finite norms."""
        shards = [local_shard(parameter).detach() for parameter in self.parameters.values()]
        norms = torch._foreach_norm(shards)
        return bool(torch.stack(norms).isfinite().all())

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def using(self, values: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        """Context in which the model uses `average` or `old_policy`; the trained values if these are empty."""
        return replaced(self.parameters, values)

    def tensors(self) -> dict[str, Tensor]:
        """The optimizers' state, named PARAMETER.KEY, for a checkpoint."""
        return {
            f"{name}.{key}": value
            for name, parameter in self.parameters.items()
            for optimizer in self.optimizers
            for key, value in optimizer.state.get(parameter, {}).items()
        }

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the state that `tensors` returned; for sharded tensors, this rank's shard."""
        states: dict[str, dict[str, Tensor]] = {name: {} for name in self.parameters}
        for full_name, value in tensors.items():
            name, _, key = full_name.rpartition(".")
            parameter = self.parameters[name]
            if value.ndim == 0:  # a counter
                states[name][key] = value.clone()
            else:
                value = value.to(parameter.device, copy=True)
                states[name][key] = shard_like(parameter, value)

        for optimizer in self.optimizers:
            param_groups = optimizer.state_dict()["param_groups"]
            (group,) = param_groups
            numbered = dict(
                zip(group["params"], map(states.get, group["param_names"]), strict=True)
            )
            # moves the counters of a fused optimizer to the device
            optimizer.load_state_dict({"state": numbered, "param_groups": param_groups})


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def build_optimizers(
    transformer: Denoiser, parameters: Mapping[str, nn.Parameter], config: Config
) -> list[torch.optim.Optimizer]:
    """AdamW for all parameters, or Muon for the 2-D weights of blocks and AdamW for the rest."""
    by_muon = {}
    if config.optimizer == "muon":
        by_muon = {
            name: parameter
            for name, parameter in parameters.items()
            if transformer.is_block_matrix(name, parameter)
        }
    by_adamw = {name: parameter for name, parameter in parameters.items() if name not in by_muon}
    settings = {
        "lr": config.learning_rate,
        "weight_decay": config.weight_decay,
        "eps": config.adam_eps,
    }

    optimizers: list[torch.optim.Optimizer] = []
    if by_adamw:
        on_gpu = next(iter(by_adamw.values())).is_cuda
        fused = True if on_gpu else None  # the unfused one makes a copy of all parameters
        optimizers.append(torch.optim.AdamW(list(by_adamw.items()), fused=fused, **settings))
    if by_muon:
        # scaled so that both optimizers use one learning rate
        muon = torch.optim.Muon(list(by_muon.items()), adjust_lr_fn="match_rms_adamw", **settings)
        optimizers.append(muon)
    return optimizers
