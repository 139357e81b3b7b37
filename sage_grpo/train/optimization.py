"""Which parameters are trained, and one optimizer step on them: clip, warm up, average."""

from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from sage_grpo.config import Config
from sage_grpo.models.lora import POLICY, adapter_parameters, dead_modules
from sage_grpo.models.packed import PackedTransformer
from sage_grpo.parallel.fsdp import like, local, replaced, whole


def trainable_parameters(transformer: PackedTransformer, use_lora: bool) -> dict[str, nn.Parameter]:
    """The adapter's parameters, or all that a text-to-video forward uses; everything else is frozen."""
    if use_lora:
        chosen = adapter_parameters(transformer, POLICY)
    else:
        dead = dead_modules(transformer)
        chosen = {name: p for name, p in transformer.named_parameters() if not name.startswith(dead)}
    transformer.requires_grad_(False)
    for parameter in chosen.values():
        parameter.requires_grad_(True)
    return chosen


class Optimization:
    """AdamW, or Muon for the 2-D weights of the blocks and AdamW for the rest; warm-up, clipping, averaged weights."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: Config) -> None:
        self.parameters, self.config, self.updates = dict(parameters), config, 0
        shared = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
        muon = {
            name: p
            for name, p in parameters.items()
            if config.optimizer == "muon" and p.ndim == 2 and name.startswith("transformer_blocks.")
        }
        rest = {name: p for name, p in parameters.items() if name not in muon}
        self.optimizers: list[torch.optim.Optimizer] = []
        if rest:
            fused = next(iter(rest.values())).is_cuda  # the other kind copies all parameters once
            self.optimizers.append(torch.optim.AdamW(list(rest.items()), fused=fused or None, **shared))
        if muon:  # scaled so that one learning rate serves both
            self.optimizers.append(torch.optim.Muon(list(muon.items()), adjust_lr_fn="match_rms_adamw", **shared))
        self.average = {n: p.detach().clone() for n, p in parameters.items()} if config.ema_decay else {}

    @property
    def learning_rate(self) -> float:
        """Of the next step."""
        warmup = self.config.warmup_steps
        return self.config.learning_rate * (min(1.0, (self.updates + 1) / warmup) if warmup else 1.0)

    def clip(self) -> float:
        """Clip the gradient; returns its norm before."""
        return whole(nn.utils.clip_grad_norm_(self.parameters.values(), self.config.max_grad_norm)).item()

    def step(self) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.learning_rate
            optimizer.step()
        self.updates += 1
        with torch.no_grad():
            for name, average in self.average.items():
                local(average).lerp_(local(self.parameters[name]), 1 - self.config.ema_decay)

    def forget(self) -> None:
        """Drop the gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def averaged(self) -> AbstractContextManager[None]:
        """Context in which the model has the averaged weights, if there are any."""
        return replaced(self.parameters, self.average)

    def tensors(self) -> dict[str, Tensor]:
        """The optimizers' state by parameter name, for a checkpoint."""
        return {
            f"{name}.{key}": value
            for name, p in self.parameters.items()
            for optimizer in self.optimizers
            for key, value in optimizer.state.get(p, {}).items()
        }

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back what `tensors` gave, of sharded tensors this rank's part."""
        states: dict[str, dict[str, Tensor]] = {name: {} for name in self.parameters}
        for full_name, value in tensors.items():
            name, _, key = full_name.rpartition(".")
            parameter = self.parameters[name]
            home = value.clone() if value.ndim == 0 else like(parameter, value.to(parameter.device, copy=True))
            states[name][key] = home
        for optimizer in self.optimizers:
            (group,) = groups = optimizer.state_dict()["param_groups"]
            own = dict(zip(group["params"], map(states.get, group["param_names"]), strict=True))
            optimizer.load_state_dict({"state": own, "param_groups": groups})  # a fused one's counters go to the device
