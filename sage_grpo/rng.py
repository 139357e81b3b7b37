"""Random draws as pure functions of (seed, purpose, step, prompt, sample): there is no generator state to save.

Each draw seeds a Philox generator with a 128-bit hash of its key and runs on the CPU, so a rollout does not depend on
the number of ranks, the batch split or the device, and a resumed run continues exactly. (torch's CPU generator uses
only 32 bits of its seed: draws within one long run would collide.)
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

# "generate_*" is for generation and validation, which never reuse the noise of training
PURPOSES = (
    "rollout_init",
    "rollout_sde",
    "generate_init",
    "generate_sde",
    "permutation",
    "prompt_order",
    "window",
)


def generator(
    seed: int, purpose: str, *, step: int = 0, prompt: int = 0, sample: int = 0, index: int = 0
) -> np.random.Generator:
    """The generator of one draw.

    step: training iteration, or epoch for the prompt order. prompt: position in the training list, or `Request.index`
    in validation and generation. sample: clip of the prompt in this iteration, or its group for a window. index:
    additional counter within a sample, such as the denoising step of SDE noise.
    """
    if purpose not in PURPOSES:
        raise ValueError(f"purpose is {purpose!r}; choose one of {', '.join(PURPOSES)}")
    counters = (int(number) for number in (seed, step, prompt, sample, index))
    key = ":".join(map(str, (purpose, *counters)))
    digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def normal(shape: Sequence[int], seed: int, purpose: str, **key: int) -> Tensor:
    """Standard normal fp32 tensor of `shape`, on the CPU."""
    draw = generator(seed, purpose, **key).standard_normal(tuple(shape), dtype=np.float32)
    return torch.from_numpy(draw)


def permutation(n: int, seed: int, purpose: str, **key: int) -> Tensor:
    """Random permutation of 0..n-1, as a LongTensor."""
    return torch.from_numpy(generator(seed, purpose, **key).permutation(n))


def integer(n: int, seed: int, purpose: str, **key: int) -> int:
    """Random integer in 0..n-1."""
    return int(generator(seed, purpose, **key).integers(n))
