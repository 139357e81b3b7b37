"""One style for all figures. Colors read on light and dark pages; each sampler and each KL strategy keeps its own."""

from collections.abc import Mapping
from itertools import cycle
from pathlib import Path
from typing import Any

STYLE = Path(__file__).with_suffix(".mplstyle")

BLUE = "#3b7dbd"
ORANGE = "#d9822b"
GREEN = "#3f8f68"
PURPLE = "#9c6b95"
RED = "#c4544a"
YELLOW = "#b39b3c"
PALE = "#7fa6c4"
GREY = "#7b8794"
PALETTE = (BLUE, ORANGE, GREEN, PURPLE, RED, YELLOW, PALE, GREY)

SAMPLERS = {
    "sage_grpo": BLUE,
    "dance_grpo": RED,
    "flow_grpo": ORANGE,
    "cps": PURPLE,
    "precise": GREEN,
    "ode": GREY,
}
STRATEGIES = {
    "dual moving": BLUE,
    "fixed": ORANGE,
    "moving": GREEN,
    "step-wise": PURPLE,
    "dual fixed": RED,
    "none": GREY,
}


def strategy(config: Mapping[str, Any]) -> str:
    """Name of the KL strategy that the flags of a run select."""
    if not config.get("kl_weight"):
        return "none"
    if not config.get("dual_kl_moving_weight"):
        return "step-wise"
    anchor = "moving" if config.get("use_moving_KL") else "fixed"
    return f"dual {anchor}" if config.get("use_dual_kl") else anchor


def colors_of(*kinds: Mapping[str, str]) -> dict[str, str]:
    """Name -> color. Each of `kinds` maps the same names to samplers or KL strategies.

    The first that tells all names apart decides; if none does, colors come from the palette.
    """
    short_names = {name.removesuffix("_grpo"): color for name, color in SAMPLERS.items()}
    known = STRATEGIES | SAMPLERS | short_names
    for kind in kinds:
        all_differ = len(set(kind.values())) == len(kind)
        if all_differ and all(value in known for value in kind.values()):
            return {name: known[value] for name, value in kind.items()}
    return dict(zip(kinds[0], cycle(PALETTE), strict=False))
