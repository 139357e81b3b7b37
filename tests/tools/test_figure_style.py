"""Each sampler and each KL strategy has one color, in every figure."""

import matplotlib
import pytest

from sage_grpo.algo.sde import SDES
from sage_grpo.algo.trust_region import trust_region
from sage_grpo.tools.figure_style import PALETTE, SAMPLERS, STRATEGIES, STYLE, colors_of, strategy


def test_every_sampler_and_strategy_has_a_color_of_its_own():
    assert SAMPLERS.keys() == SDES.keys()
    assert len(set(SAMPLERS.values())) == len(SAMPLERS)
    assert len(set(STRATEGIES.values())) == len(STRATEGIES)
    with matplotlib.rc_context(fname=STYLE):
        assert matplotlib.rcParams["axes.prop_cycle"].by_key()["color"] == list(PALETTE)


def contrast(color: str, ground: str) -> float:
    """Ratio of luminances, as WCAG defines it."""
    light = []
    for text in (color, ground):
        parts = [int(text[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [
            part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
        ]
        light.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] + 0.05)
    return max(light) / min(light)


@pytest.mark.parametrize("ground", ["#ffffff", "#1d2229"], ids=["light", "dark"])
def test_colors_can_be_told_from_a_light_and_from_a_dark_page(ground):
    assert min(contrast(color, ground) for color in PALETTE) > 2.5


def test_names_of_samplers_and_strategies_keep_their_colors_wherever_they_stand():
    assert colors_of({"x": "dance_grpo", "y": "sage"}) == {
        "x": SAMPLERS["dance_grpo"],
        "y": SAMPLERS["sage_grpo"],
    }
    assert colors_of({"fixed": "fixed", "none": "none"}) == {
        name: STRATEGIES[name] for name in ("fixed", "none")
    }
    same = {"a": "cps", "b": "cps"}
    assert colors_of(same, {"a": "moving", "b": "fixed"}) == {
        "a": STRATEGIES["moving"],
        "b": STRATEGIES["fixed"],
    }
    assert colors_of(same, {"a": "fixed", "b": "fixed"}) == {"a": PALETTE[0], "b": PALETTE[1]}
    many = colors_of({str(i): "" for i in range(20)})
    assert len(many) == 20 and many["8"] == PALETTE[0]


@pytest.mark.parametrize(
    ("changes", "name", "anchor"),
    [
        ({}, "dual moving", "moving"),
        ({"use_dual_kl": False}, "moving", "moving"),
        ({"use_moving_KL": False}, "dual fixed", "fixed"),
        ({"use_moving_KL": False, "use_dual_kl": False}, "fixed", "fixed"),
        ({"dual_kl_moving_weight": 0.0}, "step-wise", None),
        ({"kl_weight": 0.0}, "none", None),
    ],
)
def test_the_strategy_is_the_one_that_trains(changes, name, anchor):
    flags = {"kl_weight": 0.3, "use_moving_KL": True, "use_dual_kl": True}
    flags |= {"dual_kl_moving_weight": 1.0, "dual_kl_step_weight": 1.0} | changes
    found = trust_region(**flags)
    assert strategy(flags) == name and name in STRATEGIES and found.anchor == anchor
    assert bool(found.velocity_weight) == name.startswith(("dual", "step"))
