"""Counts the attention kernels that a model runs."""

from torch.utils._python_dispatch import TorchDispatchMode

from sage_grpo.models.attention import KEPT


class CountedKernels(TorchDispatchMode):
    """How often attention is really computed."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in KEPT
        return func(*args, **(kwargs or {}))
