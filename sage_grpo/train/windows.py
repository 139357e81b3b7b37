"""Windows: the denoising steps in which a clip explores, and which it trains.

Outside its window a clip follows the ODE, which has no log-probability: there it may be computed in any way that is
cheap.
"""

from dataclasses import dataclass

from torch import Tensor

from sage_grpo import rng
from sage_grpo.config.windows import WindowForm


@dataclass(frozen=True)
class Windows:
    """The windows of a run; `build_windows` fits them to its sampler."""

    form: WindowForm
    size: int  # denoising steps of a window
    first: int  # first step at which a window may start
    num_starts: int  # number of steps at which a window may start
    seed: int
    stride: int = 1  # steps from one of these starts to the next

    @property
    def starts(self) -> range:
        """The steps at which a window may start."""
        return range(self.first, self.first + self.num_starts * self.stride, self.stride)

    @property
    def steps(self) -> range:
        """All steps that may be in a window."""
        return range(self.first, self.starts[-1] + self.size)

    def start(self, iteration: int, prompt_index: int, group: int) -> int:
        """First denoising step of the window of a prompt's group in an iteration."""
        group_key = {"prompt": prompt_index, "sample": group} if self.form.per_group else {}
        if self.form.kind == "random":
            number = rng.integer(self.num_starts, self.seed, "window", step=iteration, **group_key)
            return self.starts[number]
        phase = 0
        if self.form.per_group:
            phase = rng.integer(self.num_starts, self.seed, "window", prompt=prompt_index)
        return self.starts[(phase + iteration // self.form.every) % self.num_starts]


def build_windows(form: WindowForm, stochastic: Tensor, seed: int) -> Windows:
    """Windows among the steps that have noise and are trained, `stochastic` (T,) bool; they must be consecutive."""
    noisy = stochastic.nonzero().flatten().tolist()
    if not form.last_step:
        noisy = [step for step in noisy if step < len(stochastic) - 1]
    if not noisy:
        raise ValueError(
            "the schedule has no stochastic step to train: choose an sde_type other than ode, or eta > 0; "
            "with lora_experts, a transformer that has steps"
        )

    if noisy != list(range(noisy[0], noisy[-1] + 1)):
        numbers = ", ".join(str(step + 1) for step in noisy)
        raise ValueError(
            f"sde_type has noise at denoising steps {numbers}; the noisy steps of the sampler must follow each other:"
            " give the steps between them noise, too"
        )

    size = len(noisy) if form.size is None else form.size
    if size > len(noisy):
        raise ValueError(
            f"sde_window has a SIZE of {size}; it can be at most {len(noisy)}, the steps that explore and are trained"
        )
    if not form.even:
        num_starts = len(noisy) - size + 1
        return Windows(form, size, first=noisy[0], num_starts=num_starts, seed=seed)
    if len(noisy) % size:
        raise ValueError(
            f"sde_window has a SIZE of {size} and even, but {len(noisy)} steps can explore,"
            f" which {size} does not divide: choose another SIZE or num_sampling_steps"
        )
    num_starts = len(noisy) // size
    return Windows(form, size, first=noisy[0], num_starts=num_starts, seed=seed, stride=size)


def num_trained(window_size: int, fraction: float) -> int:
    """How many of a window's denoising steps each clip trains."""
    return max(1, round(fraction * window_size))
