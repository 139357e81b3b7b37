"""Where rollouts explore: every group of clips has noise in some consecutive denoising steps, and trains on these.

Outside its window a clip follows the ODE, which has no log-probability: there it may be computed in any way that is
cheap, and the first ratio is still exactly 1.
"""

from dataclasses import dataclass

from torch import Tensor

from sage_grpo import rng

FORMS = "all, all_but_last, random:SIZE, slide:SIZE[:EVERY], random_iteration:SIZE or slide_iteration:SIZE[:EVERY]"


@dataclass(frozen=True)
class Windows:
    """The windows of a run; `parse_windows` makes them from `sde_window`."""

    kind: str
    size: int  # denoising steps
    every: int  # iterations after which a sliding window advances
    first: int  # step
    places: int  # where the window may begin, from `first` on
    seed: int

    @property
    def steps(self) -> range:
        """All steps that may be in a window."""
        return range(self.first, self.first + self.places - 1 + self.size)

    def start(self, step: int, prompt: int, group: int) -> int:
        """First denoising step of the window of a prompt's group in iteration `step`."""
        kind, *of_all = self.kind.split("_")
        own = {} if of_all else {"prompt": prompt, "sample": group}
        if kind == "random":
            return self.first + rng.integer(self.places, self.seed, "window", step=step, **own)
        phase = rng.integer(self.places, self.seed, "window", prompt=prompt) if own else 0
        return self.first + (phase + step // self.every) % self.places


def parse_windows(text: str, stochastic: Tensor, seed: int) -> Windows:
    """Windows within the steps that can have noise, `stochastic` (T,) bool, which follow each other in every sampler.

    `all`; `all_but_last`; `random:SIZE`, drawn for each group of clips; `slide:SIZE:EVERY`, which begins at another
    place for each prompt, advances by one every EVERY (25) iterations and wraps around (MixGRPO). With `_iteration` all
    groups of an iteration have the same window, and one that slides begins at the first step.
    """
    noisy = stochastic.nonzero().flatten().tolist()
    kind, *numbers = text.split(":")
    if kind == "all_but_last":
        noisy = [step for step in noisy if step < len(stochastic) - 1]
    if not noisy:
        raise ValueError("the schedule has no stochastic step to train: choose an sde_type other than ode, or eta > 0")
    if not numbers and kind in ("all", "all_but_last"):
        return Windows("all", len(noisy), 1, noisy[0], 1, seed)
    name = kind.removesuffix("_iteration")
    if name not in ("random", "slide") or not 1 <= len(numbers) <= 1 + (name == "slide") or "" in numbers:
        raise ValueError(f"sde_window is {text!r}; write {FORMS}")
    if not all(number.isdigit() and int(number) for number in numbers) or int(numbers[0]) > len(noisy):
        raise ValueError(f"sde_window is {text!r}; its numbers must be whole, and SIZE at most {len(noisy)} steps")
    size, every = int(numbers[0]), int(numbers[1]) if len(numbers) > 1 else 25
    return Windows(kind, size, every, noisy[0], len(noisy) - size + 1, seed)
