"""The trained part of a backbone, independent of architecture: its blocks and how they run.

Blocks are the units of sharding, activation recomputation, compilation and LoRA.
"""

import functools
import json
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from diffusers.loaders import PeftAdapterMixin
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from sage_grpo.models import fp8
from sage_grpo.models.attention import KEPT

TRANSFORMER = "transformer"  # folder of the transformer in the layout of diffusers


class Denoiser(PeftAdapterMixin):
    """Mixin for a transformer (an nn.Module), which must call `run_block` for each of its blocks."""

    # set by subclasses
    block_list = "transformer_blocks"  # name of the module list that holds the blocks
    varying: tuple[int, int] | None = None  # (input, dim) of a block whose length varies by request
    never_trained: tuple[str, ...] = ()  # prefixes of modules whose outputs the forward never uses

    # set by `prepare_blocks`
    num_recomputed = 0  # leading blocks whose activations are recomputed
    compiled = False
    trained = False  # whether any parameter is
    in_8_bits: fp8.Switch | None = None

    # set by `split_sequence`
    sequence_group: dist.ProcessGroup | None = None

    @property
    def experts(self) -> Mapping[str, "Denoiser"]:
        """The transformers between which the noise level chooses, by folder, that of high levels first; here one."""
        return {TRANSFORMER: self}

    @property
    def all_blocks(self) -> nn.ModuleList:
        return self.get_submodule(self.block_list)

    def is_block_matrix(self, name: str, parameter: Tensor) -> bool:
        """Whether a parameter is a 2-D weight of a block, which Muon may train."""
        return parameter.ndim == 2 and name.startswith(f"{self.block_list}.")

    def split_sequence(self, group: dist.ProcessGroup | None) -> None:
        """Split the tokens of every forward across the ranks of a group; every rank gets the full velocity."""
        if group is not None:
            raise ValueError(
                f"sp_size is {dist.get_world_size(group)}; this model has no sequence parallelism"
            )

    def to_json_string(self) -> str:
        """The config of the stock class as JSON, so that exported folders load without this package."""
        return "{}\n"

    def prepare_blocks(
        self,
        recomputed: float = 0.0,
        keep_attention: bool = False,
        compiled: bool = False,
        lossy: str = "exact",
    ) -> None:
        """Recompute a leading fraction of the blocks and compile all of them. Call once it is known what is trained.

        keep_attention: keep the outputs of attention, the most expensive part, instead of recomputing them.
        lossy: how the blocks compute inside the context `lossy`, `exact` or `fp8`.
        """
        self.num_recomputed = math.ceil(recomputed * len(self.all_blocks))
        self.compiled = compiled
        self.trained = any(parameter.requires_grad for parameter in self.parameters())
        if lossy == "fp8":
            self.in_8_bits = fp8.Switch(self.all_blocks)

        if compiled:
            # Every adapter and kind of text length gets a graph of its own. Beyond the limit torch would fall back
            # to eager execution, which rounds differently from the rollout's graph: fail instead.
            torch._dynamo.config.recompile_limit = 64
            torch._dynamo.config.fail_on_recompile_limit_hit = True

        kwargs: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        if keep_attention:
            kwargs["context_fn"] = functools.partial(
                create_selective_checkpoint_contexts, keep_attention_policy
            )

        for number, block in enumerate(self.all_blocks):
            if number < self.num_recomputed:
                block.forward = functools.partial(checkpoint, block.forward, **kwargs)
            if compiled:
                block.forward = functools.partial(self._run_compiled, torch.compile(block.forward))

    def lossy(self) -> AbstractContextManager[None]:
        """Context for forwards that no log-probability depends on: blocks may be faster and less exact."""
        return self.in_8_bits or nullcontext()

    def run_block(self, block: nn.Module, inputs: tuple[Tensor, ...], *others: Any) -> Any:
        """Run one block; if compiled and trained, rollout and training use the same graph.

        The compiler fuses a forward without gradients differently, which would round differently. So such blocks always
        run with gradients enabled, and the autograd history is dropped where it is not needed. All blocks see the same
        kind of inputs and so share a graph.
        """
        if not self.compiled:
            return block(*inputs, *others)

        wants_grad = torch.is_grad_enabled()
        lossy = self.in_8_bits is not None and self.in_8_bits.on
        needs_exact_graph = self.trained and not lossy
        if needs_exact_graph:
            inputs = tuple(x if x.requires_grad else x.detach().requires_grad_() for x in inputs)
        with torch.set_grad_enabled(wants_grad or needs_exact_graph):
            outputs = block(*inputs, *others)

        if wants_grad:
            return outputs
        if isinstance(outputs, Tensor):
            return outputs.detach()
        return tuple(output.detach() for output in outputs)

    def _run_compiled(self, compiled: Callable[..., Any], *inputs: Any) -> Any:
        """Call a compiled forward with the varying length marked, so that one graph serves all lengths.

        Without the mark, the first length gets a graph of its own besides the one for all lengths, and which of the two
        runs depends on what ran before. This comes after FSDP's hooks, whose copies of the inputs lose the mark.
        """
        if self.varying is not None:  # all other sizes are constant in a run
            position, dim = self.varying
            torch._dynamo.maybe_mark_dynamic(inputs[position], dim)
        return compiled(*inputs)


def keep_attention_policy(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep the attention of tokens to each other; that to a short context is cheap to recompute."""
    if operator in KEPT:
        query, key = args[:2]
        if query.shape == key.shape:
            return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


class StockDenoiser(Denoiser):
    """Mixin for a transformer of diffusers; it must precede that class, whose `to_json_string` it overrides."""

    stock: type  # the class of diffusers

    def split_sequence(self, group: dist.ProcessGroup | None) -> None:
        count = 1 if group is None else dist.get_world_size(group)
        heads = self.config.num_attention_heads
        if heads % count:
            raise ValueError(f"sp_size is {count}; it must divide the model's {heads} heads")
        self.sequence_group = group

    def to_json_string(self) -> str:
        config = json.loads(self.stock.to_json_string(self))
        config["_class_name"] = self.stock.__name__
        return json.dumps(config, indent=2, sort_keys=True) + "\n"
