"""The denoiser of Wan 2.2 A14B: two transformers, of which the noise level of a clip chooses one.

Parameters have their stock names behind `transformer.`, of the one for high noise, or `transformer_2.`.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sage_grpo.models import fp8
from sage_grpo.models.denoiser import TRANSFORMER, Denoiser
from sage_grpo.models.swap import BlockSwap
from sage_grpo.models.wan.transformer import WanTransformer

HIGH = TRANSFORMER
LOW = "transformer_2"


class Expert(WanTransformer):
    """One of the transformers; its blocks may be in host memory while it does not run."""

    swap: BlockSwap | None = None

    def run_block(self, block: nn.Module, inputs: tuple[Tensor, ...], *others: Any) -> Tensor:
        if self.swap is None:
            return super().run_block(block, inputs, *others)
        self.swap.fetch(block)
        video = super().run_block(block, inputs, *others)
        return self.swap.before_backward(block, video)


class Experts(nn.Module, Denoiser):
    """Both transformers."""

    def __init__(self, high: Expert, low: Expert) -> None:
        super().__init__()
        self.transformer = high
        self.transformer_2 = low

    @property
    def experts(self) -> Mapping[str, Expert]:
        return {HIGH: self.transformer, LOW: self.transformer_2}

    @property
    def all_blocks(self) -> nn.ModuleList:
        return nn.ModuleList([*self.transformer.all_blocks, *self.transformer_2.all_blocks])

    def is_block_matrix(self, name: str, parameter: Tensor) -> bool:
        expert, _, own_name = name.partition(".")
        return self.experts[expert].is_block_matrix(own_name, parameter)

    def split_sequence(self, group: dist.ProcessGroup | None) -> None:
        for expert in self.experts.values():
            expert.split_sequence(group)

    def prepare_blocks(
        self,
        recomputed: float = 0.0,
        keep_attention: bool = False,
        compiled: bool = False,
        lossy: str = "exact",
    ) -> None:
        for expert in self.experts.values():
            expert.prepare_blocks(recomputed, keep_attention, compiled)
        if lossy == "fp8":
            self.in_8_bits = fp8.Switch(self.all_blocks)
            for expert in self.experts.values():
                expert.in_8_bits = self.in_8_bits

    def forward(self, expert: str, *inputs: Tensor) -> Tensor:
        """The velocity that one of the transformers predicts; `inputs` as for `WanTransformer`."""
        return self.experts[expert](*inputs)

    def take_turns(self, device: torch.device) -> BlockSwap:
        """Keep the frozen weights of one transformer's blocks on a device, the others in host memory.

        The weights have no values yet. Everything else moves to the device.
        """
        swap = BlockSwap([expert.all_blocks for expert in self.experts.values()], device)
        swapped = {id(weight) for weights in swap.weights.values() for weight in weights}
        for parameter in self.parameters():
            if id(parameter) not in swapped:
                parameter.data = parameter.data.to(device)
        for expert in self.experts.values():
            expert.swap = swap
        return swap
