"""`sde_window`: which denoising steps of a clip explore. Its text is parsed here and nowhere else."""

from dataclasses import dataclass

FORMS = (
    "all, all_but_last, random:SIZE[:even], slide:SIZE[:EVERY], "
    "random_iteration:SIZE[:even] or slide_iteration:SIZE[:EVERY], the last four also with :all_but_last"
)
ALL_BUT_LAST = "all_but_last"
EVEN = "even"
DEFAULT_EVERY = 25


@dataclass(frozen=True)
class WindowForm:
    """What `sde_window` asks for, before the sampler and its steps are known."""

    kind: str  # "all", "random" or "slide"
    size: int | None = None  # denoising steps of a window; None: every step that can explore
    every: int = DEFAULT_EVERY  # iterations after which a sliding window advances by one step
    # whether each group of clips has its own window; otherwise all groups of an iteration share one
    per_group: bool = True
    last_step: bool = True  # whether the last denoising step may explore
    # random windows only: whether they do not overlap, so that all steps explore equally often
    even: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether every clip explores in all steps that can explore."""
        return self.kind == "all"


def parse_window(text: str) -> WindowForm:
    """Parse the value of `sde_window`.

    `all` and `all_but_last` explore in every step. `random:SIZE` draws a window for each group of clips.
    `slide:SIZE:EVERY` starts at a different step for each prompt, advances by one step every EVERY iterations and wraps
    around (MixGRPO). With `_iteration`, all groups of an iteration share one window, and a sliding one starts at the
    first step.

    After the numbers, `all_but_last` keeps the last step, whose noise would stay in the clip, out of all windows.
    With `even`, the windows to draw from do not overlap; otherwise steps near both ends are in fewer of them.
    """
    name, *parts = text.split(":")
    if not parts and name in ("all", ALL_BUT_LAST):
        return WindowForm("all", last_step=name == "all")
    words = [part for part in parts if part in (ALL_BUT_LAST, EVEN)]
    num_numbers = len(parts) - len(words)
    numbers = parts[:num_numbers]
    words_are_last = parts[num_numbers:] == words
    words_repeat = len(set(words)) < len(words)
    if not words_are_last or words_repeat or (EVEN in words and "random" not in name):
        raise ValueError(f"sde_window is {text!r}; write {FORMS}")
    kind = name.removesuffix("_iteration")
    most_numbers = {"random": 1, "slide": 2}.get(kind, 0)
    if not 1 <= len(numbers) <= most_numbers or "" in numbers:
        raise ValueError(f"sde_window is {text!r}; write {FORMS}")
    if not all(number.isdigit() and int(number) > 0 for number in numbers):
        raise ValueError(f"sde_window is {text!r}; its numbers must be whole and at least 1")
    every = int(numbers[1]) if len(numbers) > 1 else DEFAULT_EVERY
    return WindowForm(
        kind,
        size=int(numbers[0]),
        every=every,
        per_group=name == kind,
        last_step=ALL_BUT_LAST not in words,
        even=EVEN in words,
    )
