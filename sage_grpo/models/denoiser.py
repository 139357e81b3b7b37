"""The trained part of a backbone, independent of architecture: its blocks and how they run.

Blocks are the units of sharding, activation recomputation, compilation and LoRA.
"""

import functools
import json
import math
from collections.abc import Callable
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


class Denoiser(PeftAdapterMixin):
    """Mixin for a transformer (an nn.Module), which must call `run_block` for each of its blocks."""

    block_list = "transformer_blocks"  # name of the module list
    varying: tuple[int, int] | None = (
        None  # (input, dim) of a block whose length varies between requests
    )
    never_trained: tuple[
        str, ...
    ] = ()  # (prefixes of) modules whose outputs the forward never uses: no gradient
    num_recomputed, compiled, trained = 0, False, False
    in_8_bits: fp8.Switch | None = None
    sequence_group: dist.ProcessGroup | None = None

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
        """The config of the stock class, so that exported folders load without this package."""
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
        lossy: what the blocks do inside `lossy`, exact or fp8.
        """
        if lossy == "fp8":
            self.in_8_bits = fp8.Switch(self.all_blocks)
        self.num_recomputed, self.compiled = math.ceil(recomputed * len(self.all_blocks)), compiled
        self.trained = any(parameter.requires_grad for parameter in self.parameters())
        if compiled:  # other adapters and text lengths get separate graphs; too many are an error
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
        """Context for forwards on which no log-probability depends: blocks may be faster and less exact."""
        return self.in_8_bits or nullcontext()

    def run_block(self, block: nn.Module, inputs: tuple[Tensor, ...], *others: Any) -> Any:
        """Run one block; if compiled and trained, rollout and training use the same graph.

        The compiler fuses a forward without gradients differently, which would round differently. So such blocks always
        run with gradients enabled, and the autograd history is dropped where it is not needed. All blocks see the same
        kind of inputs and so share a graph.
        """
        if not self.compiled:
            return block(*inputs, *others)
        wanted = torch.is_grad_enabled()
        trained = self.trained and not (self.in_8_bits and self.in_8_bits.on)
        if trained:
            inputs = tuple(x if x.requires_grad else x.detach().requires_grad_() for x in inputs)
        with torch.set_grad_enabled(wanted or trained):
            outputs = block(*inputs, *others)
        if wanted:
            return outputs
        return (
            outputs.detach()
            if isinstance(outputs, Tensor)
            else tuple(output.detach() for output in outputs)
        )

    def _run_compiled(self, compiled: Callable[..., Any], *inputs: Any) -> Any:
        """Call a compiled forward with the varying length marked, so that one graph serves all lengths.

        Otherwise the first length would get a graph of its own besides the one for all lengths, and which of the two
        runs would depend on what ran before. This comes after FSDP's hooks, whose copies of the inputs lose the mark.
        """
        if self.varying is not None:  # all other sizes are constant in a run
            torch._dynamo.maybe_mark_dynamic(inputs[self.varying[0]], self.varying[1])
        return compiled(*inputs)


def keep_attention_policy(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep the attention of tokens to each other; that to a short context is cheap to recompute."""
    kept = operator in KEPT and args[0].shape == args[1].shape  # query and key
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


class StockDenoiser(Denoiser):
    """Mixin for a transformer of diffusers; it stands before that one, because it replaces its `to_json_string`."""

    stock: type  # the class of diffusers

    def split_sequence(self, group: dist.ProcessGroup | None) -> None:
        count, heads = (
            1 if group is None else dist.get_world_size(group),
            self.config.num_attention_heads,
        )
        if heads % count:
            raise ValueError(f"sp_size is {count}; it must divide the model's {heads} heads")
        self.sequence_group = group

    def to_json_string(self) -> str:
        config = json.loads(self.stock.to_json_string(self)) | {"_class_name": self.stock.__name__}
        return json.dumps(config, indent=2, sort_keys=True) + "\n"
