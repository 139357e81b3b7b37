"""One style for all figures. Colors read on light and dark pages; each sampler and each KL strategy keeps its own."""

from collections.abc import Mapping
from itertools import cycle
from pathlib import Path
from typing import Any

STYLE = Path(__file__).with_name("templates") / "report.mplstyle"
PALETTE = BLUE, ORANGE, GREEN, PURPLE, RED, YELLOW, PALE, GREY = (
    "#3b7dbd", "#d9822b", "#3f8f68", "#9c6b95", "#c4544a", "#b39b3c", "#7fa6c4", "#7b8794",
)  # fmt: skip
SAMPLERS = {
    "sage_grpo": BLUE,
    "dance_grpo": RED,
    "flow_grpo": ORANGE,
    "cps": PURPLE,
    "precise": GREEN,
    "ode": GREY,
}
STRATEGIES = dict(
    zip(("dual moving", "fixed", "moving", "step-wise", "dual fixed"), PALETTE, strict=False)
)
STRATEGIES["none"] = GREY


def strategy(config: Mapping[str, Any]) -> str:
    """Name of the KL strategy that the flags of a run select."""
    if not config.get("kl_weight"):
        return "none"
    if not config.get("dual_kl_moving_weight"):
        return "step-wise"
    return f"{'dual ' if config.get('use_dual_kl') else ''}{'moving' if config.get('use_moving_KL') else 'fixed'}"


def colors_of(*kinds: Mapping[str, str]) -> dict[str, str]:
    """Name -> color of its sampler or KL strategy, by the first of `kinds` that tells all apart; else the palette's."""
    known = (
        STRATEGIES
        | SAMPLERS
        | {name.removesuffix("_grpo"): color for name, color in SAMPLERS.items()}
    )
    for kind in kinds:
        found = {name: known.get(of) for name, of in kind.items()}
        if len(set(kind.values())) == len(kind) and all(found.values()):
            return found
    return dict(zip(kinds[0], cycle(PALETTE), strict=False))
