"""The figures of a report with their captions, which say what a figure shows and what healthy looks like.

Metrics that a run did not record are left out. Shapes: N logged iterations, T denoising steps.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize

from sage_grpo.runs.history import RunHistory, as_float, column, numbers
from sage_grpo.tools.figure_style import BLUE, GREEN, GREY, ORANGE, PALE, PURPLE, YELLOW
from sage_grpo.tools.paired import drift
from sage_grpo.tools.report.drawing import (
    MAP,
    MIN_REACH,
    SMALL,
    WIDE,
    Curve,
    Lines,
    Panel,
    draw_breaks,
    draw_curves,
    draw_drift,
    draw_map,
    draw_scatter,
    draw_stack,
    finish,
    is_long,
    log_scale,
    panel,
    symmetric_scale,
)

MIN_DOTS = 3  # of a scatter plot
MAX_NAME_LETTERS = 28  # letters of a run's name in a legend: the last ones, which tell runs apart


@dataclass(frozen=True)
class CurveStyle:
    metric: str
    color: str
    label: str = ""


@dataclass(frozen=True)
class CurveFigure:
    """Curves of related metrics over iterations; a comparison of runs shows the first metric only."""

    title: str
    curves: tuple[CurveStyle, ...]
    caption: str
    size: tuple[float, float] = SMALL
    log_scale: bool = False
    smooth: bool = True  # False: set, not measured

    @property
    def metric(self) -> str:
        return self.curves[0].metric


# reward

TOTAL_REWARD = CurveFigure(
    "Total reward",
    (CurveStyle("reward/total", BLUE, "training"),),
    caption=(
        "Training explores with noise and validation does not, so their levels differ."
        " Both should rise, fastest at first."
    ),
    size=WIDE,
)
EXPLORATION = CurveFigure(
    "Exploration",
    (
        CurveStyle("reward/group_std", BLUE, "inside a group"),
        CurveStyle("reward/std", GREY, "over the batch"),
    ),
    caption=(
        "Spread of the reward. A slow decline is learning; near 0 inside groups, nothing is left to learn from."
    ),
)


def score_figure(title: str, style: CurveStyle) -> CurveFigure:
    """The figure of one score among several."""
    return CurveFigure(
        title,
        (style,),
        caption="Mean of this score. One that falls while the total rises is being traded away.",
    )


# gold

MATCH = CurveFigure(
    "Match",
    (CurveStyle("gold/match", GREEN, "training"),),
    caption="Share of clips that show everything their prompt names, as the oracle reads them. Higher is better.",
)
DISTANCE = CurveFigure(
    "Distance to the manifold",
    (CurveStyle("gold/distance", GREEN, "training"),),
    caption="RMS pixel distance to the nearest true clip. A rise means leaving the manifold.",
)
PROMPT_DISTANCE = CurveFigure(
    "gold/prompt_distance",
    (CurveStyle("gold/prompt_distance", GREEN),),
    caption="RMS pixel distance to the nearest clip that the prompt allows. Lower is better.",
)

# trust region and updates

KL = CurveFigure(
    "KL",
    (
        CurveStyle("kl/anchor", BLUE, "to the anchor"),
        CurveStyle("kl/rollout", ORANGE, "to the rollout"),
    ),
    caption=(
        "It should level off; with a moving anchor it is a sawtooth."
        " Exponential growth means that the policy runs away."
    ),
    log_scale=True,
)
KL_COEFFICIENT = CurveFigure(
    "KL coefficient",
    (CurveStyle("kl/coef", PURPLE),),
    caption="Weight of the KL in the loss. Stuck at a limit, it no longer controls anything.",
    log_scale=True,
    smooth=False,
)
CLIPPED_PAIRS = CurveFigure(
    "Clipped pairs",
    (
        CurveStyle("policy/clip_high", BLUE, "A > 0, above"),
        CurveStyle("policy/clip_low", ORANGE, "A < 0, below"),
    ),
    caption=(
        "Share of pairs whose gradient the clip removes."
        " Far more below than above: the KL has passed the clip range."
    ),
)
GRADIENT_NORM = CurveFigure(
    "Gradient norm",
    (CurveStyle("policy/grad_norm", BLUE),),
    caption="Before clipping. Steady or slowly falling is healthy; a climb asks for a lower learning rate.",
    log_scale=True,
)
LEARNING_RATE = CurveFigure(
    "Learning rate",
    (CurveStyle("lr", PURPLE),),
    caption="As the optimizer used it.",
    smooth=False,
)
RATIO_DEVIATION = CurveFigure(
    "Largest ratio deviation",
    (CurveStyle("policy/ratio_max_deviation", BLUE),),
    caption="Largest |ratio - 1| of an iteration; exactly 0 with one update per rollout (not nft).",
    log_scale=True,
)

REWARD = (TOTAL_REWARD, EXPLORATION)
GOLD = (MATCH, DISTANCE)
UPDATES = (KL, KL_COEFFICIENT, CLIPPED_PAIRS, GRADIENT_NORM, LEARNING_RATE, RATIO_DEVIATION)
COMPARED = (*REWARD, *GOLD, *UPDATES)


# sections of the page of one run


def reward_panels(run: RunHistory) -> list[Panel]:
    scores = [
        score_figure(name, CurveStyle(f"reward/{name}", BLUE, "training")) for name in run.scores
    ]
    return drawn(curve_panel(run, figure) for figure in (*REWARD, *scores))


def holdout_panels(run: RunHistory) -> list[Panel]:
    scores = [score_figure(metric, CurveStyle(metric, GREEN)) for metric in sorted(run.holdouts)]
    return drawn([trained_against_held_out(run), *(curve_panel(run, figure) for figure in scores)])


def gold_panels(run: RunHistory) -> list[Panel]:
    return drawn([*(curve_panel(run, figure) for figure in GOLD), gold_against_proxy(run)])


def update_panels(run: RunHistory) -> list[Panel]:
    return drawn(curve_panel(run, figure) for figure in UPDATES)


def denoising_step_panels(run: RunHistory) -> list[Panel]:
    return drawn([log_ratio_map(run), clipped_share_map(run), gradient_map(run), kl_map(run)])


def schedule_panels(run: RunHistory) -> list[Panel]:
    return drawn([noise_level(run), exploration_noise(run), equalizer(run)])


def time_panels(run: RunHistory) -> list[Panel]:
    return drawn([time_per_iteration(run)])


def drawn(panels: Iterable[Panel | None]) -> list[Panel]:
    return [panel for panel in panels if panel]


# curves of one run, and of several


def curve_panel(run: RunHistory, figure: CurveFigure) -> Panel | None:
    """The curves of one run: training, then validation, and what can be reached."""
    curves = [
        Curve(run.iteration_lines, style.metric, style.color, style.label)
        for style in figure.curves
    ]
    curves += [
        Curve(run.validations, style.metric, ORANGE, "validation") for style in figure.curves
    ]
    earlier = [
        Curve(lines, style.metric, GREY, label="")
        for style in figure.curves
        for lines in (*run.earlier_iteration_lines, *run.earlier_validations)
    ]
    breaks = sorted({line["step"] for line in run.breaks})
    return labeled_panel(figure, curves, reachable(run, figure), earlier, breaks)


def reachable(run: RunHistory, figure: CurveFigure) -> dict[str, float]:
    """What perfect clips score, and the distance that the VAE alone causes, where a figure has that metric."""
    known = {}
    for name, value in (run.head.get("perfect") or {}).items():
        known[f"reward/{name}"] = ("perfect clips", as_float(value, name))
    for name, value in (run.head.get("vae_floor") or {}).items():
        known[f"gold/{name}"] = ("VAE alone", as_float(value, name))

    limits = {}
    for style in figure.curves:
        label, value = known.get(style.metric, ("", math.nan))
        if math.isfinite(value):
            limits[label] = value
    return limits


def validation_overlays(runs: Mapping[str, RunHistory], colors: Mapping[str, str]) -> list[Panel]:
    """The validations of several runs, a panel per metric that has a standard error."""
    figures = {figure.metric: figure for figure in (*COMPARED, PROMPT_DISTANCE)}
    lines = [line for run in runs.values() for line in run.validations]
    metrics = [key for line in lines for key in line if f"{key}_stderr" in line]
    by_run = {name: run.validations for name, run in runs.items()}
    panels = []
    for metric in dict.fromkeys([TOTAL_REWARD.metric, *metrics]):
        figure = figures.get(metric) or score_figure(metric, CurveStyle(metric, BLUE))
        panels.append(overlay(figure, by_run, colors))
    return drawn(panels)


def training_overlays(runs: Mapping[str, RunHistory], colors: Mapping[str, str]) -> list[Panel]:
    """The training of several runs, a panel per figure of the page of one."""
    by_run = {name: run.iteration_lines for name, run in runs.items()}
    return drawn(overlay(figure, by_run, colors) for figure in COMPARED)


def overlay(
    figure: CurveFigure, by_run: Mapping[str, Lines], colors: Mapping[str, str]
) -> Panel | None:
    """A figure's first metric in several runs."""
    curves = []
    for name, lines in by_run.items():
        label = name if len(name) <= MAX_NAME_LETTERS else f"…{name[-MAX_NAME_LETTERS:]}"
        curves.append(Curve(lines, figure.metric, colors[name], label))
    return labeled_panel(figure, curves, limits={})


def labeled_panel(
    figure: CurveFigure,
    curves: Sequence[Curve],
    limits: Mapping[str, float],
    earlier: Sequence[Curve] = (),
    breaks: Sequence[int] = (),
) -> Panel | None:
    """A panel whose caption says from where to where its curves went; None if all is 0 or missing.

    earlier: series with another yardstick, which ended at `breaks`; they are drawn apart and left out of the caption.
    """
    shown = [curve for curve in curves if np.nan_to_num(curve.values).any()]
    past = [curve for curve in earlier if np.nan_to_num(curve.values).any()]
    if not shown and not past:
        return None
    changes = [
        f"{curve.label} {first_to_last(curve.values)}".strip()
        for curve in shown
        if np.isfinite(curve.values).sum() > 1
    ]
    caption = figure.caption
    if changes:
        caption = f"First to last: {'; '.join(changes)}. {caption}"
    if figure.smooth and any(is_long(curve.values) for curve in shown):
        caption += (
            " Lines are running means, with the 95 % interval of each mean; dots are iterations."
        )
    if breaks:
        caption += " Dotted lines: the yardstick changed, and what is gray cannot be compared."

    def draw(axes: Axes) -> None:
        draw_curves(axes, [*past, *shown], limits, figure.log_scale, figure.smooth)
        draw_breaks(axes, breaks)

    return panel(figure.title, caption, draw, figure.size)


def first_to_last(values: np.ndarray) -> str:
    """From where to where a curve went, in the means of its first and last tenth, or of more if it is noisy."""
    finite = values[np.isfinite(values)]
    count = -(-len(finite) // 10)
    if is_long(finite):
        count = max(count, 2 * MIN_REACH)
    first = finite[:count].mean()
    last = finite[-count:].mean()
    return f"{first:.3g} → {last:.3g}".replace("-", "−")


# reward against what training never sees


def trained_against_held_out(run: RunHistory) -> Panel | None:
    changes = drift(run)
    if not changes:
        return None
    return panel(
        "Trained against held out",
        "Mean change of a clip since the first validation, with its 95 % interval, in standard deviations of the clips"
        " then. The held-out reward should rise too, or stay; if it falls, that is reward hacking.",
        lambda axes: draw_drift(axes, changes),
        WIDE,
    )


def gold_against_proxy(run: RunHistory) -> Panel | None:
    if np.isfinite(column(run.full_lines, "gold/match")).sum() < MIN_DOTS:
        return None
    steps = column(run.full_lines, "step")
    reward = column(run.full_lines, "reward/total")
    gold = column(run.full_lines, "gold/match")
    return panel(
        "Gold against proxy",
        "One dot per iteration: right and up is good. Reward up and gold down is reward hacking.",
        lambda axes: draw_scatter(axes, steps, reward, gold),
    )


# by iteration and denoising step


def log_ratio_map(run: RunHistory) -> Panel | None:
    return map_panel(
        run,
        "Log-ratio",
        "log_ratio_mean",
        "Mean of log(new / old probability): with grpo minus the KL to the rollout, so 0 or slightly negative.",
        symmetric_scale,
        "RdBu_r",
    )


def clipped_share_map(run: RunHistory) -> Panel | None:
    return map_panel(
        run,
        "Clipped share",
        "clip_fraction",
        "Pairs whose ratio left the clip range. Dark rows are denoising steps that hardly learn.",
        lambda values: Normalize(0, 1),
        "Blues",
    )


def gradient_map(run: RunHistory) -> Panel | None:
    return map_panel(
        run,
        "Gradient at the velocity",
        "grad_v",
        "Norm of dL/dv. With the equalizer all rows look alike; without it, the last ones dominate.",
        log_scale,
        "viridis",
    )


def kl_map(run: RunHistory) -> Panel | None:
    return map_panel(
        run,
        "KL to the anchor",
        "kl_anchor",
        "The last steps carry most of it, since their noise is smallest.",
        log_scale,
        "viridis",
    )


def map_panel(
    run: RunHistory,
    title: str,
    metric: str,
    caption: str,
    scale: Callable[[np.ndarray], Normalize],
    colors: str,
) -> Panel | None:
    """A heat map; `scale` sees the metric (N, T). None if all is 0 or missing."""
    values = run.grid(metric)
    if not np.nan_to_num(values).any():
        return None
    return panel(
        title,
        caption,
        lambda axes: draw_map(axes, run.full_lines, values, scale(values), colors),
        MAP,
    )


# what the sampler does at each denoising step


def noise_level(run: RunHistory) -> Panel | None:
    return schedule_panel(
        run,
        "Noise level",
        (CurveStyle("sigmas", BLUE),),
        "Sigma before each denoising step, from 1 (pure noise) to 0 (the clip).",
    )


def exploration_noise(run: RunHistory) -> Panel | None:
    return schedule_panel(
        run,
        "Exploration noise",
        (CurveStyle("std", BLUE),),
        "Standard deviation injected at each step; 0 is a deterministic step.",
    )


def equalizer(run: RunHistory) -> Panel | None:
    return schedule_panel(
        run,
        "Equalizer",
        (
            CurveStyle("equalizer", BLUE, "S, factor of the loss"),
            CurveStyle("gradient_scale", ORANGE, "N, size of the gradient"),
        ),
        "S times N is the same at every step: all steps push equally hard.",
        log_scale=True,
    )


def schedule_panel(
    run: RunHistory, title: str, styles: Sequence[CurveStyle], caption: str, log_scale: bool = False
) -> Panel | None:
    schedule = run.head.get("schedule")
    if not schedule:
        return None

    def draw(axes: Axes) -> None:
        for style in styles:
            values = numbers(schedule.get(style.metric), style.metric)
            axes.plot(values, "o-", ms=2.5, color=style.color, label=style.label)
        axes.set_xlabel("denoising step")
        finish(axes, log_scale)

    return panel(title, caption, draw)


# time


PHASE_COLORS = {
    "rollout": BLUE,
    "decode": PALE,
    "reward": ORANGE,
    "gold": GREEN,
    "anchor": YELLOW,
    "update": PURPLE,
}


def time_per_iteration(run: RunHistory) -> Panel | None:
    phases = phase_seconds(run)
    if not phases:
        return None
    steps = column(run.all_full_lines, "step")
    return panel(
        "Time per iteration",
        "Phases, stacked; the legend has their means. A slow climb is a leak or a busy machine.",
        lambda axes: draw_stack(axes, steps, phases, PHASE_COLORS),
        WIDE,
    )


def phase_seconds(run: RunHistory) -> dict[str, np.ndarray]:
    """Seconds (N,) of each phase that took time; `other` is the remainder of time/total."""
    phases = {}
    for name in PHASE_COLORS:
        seconds = np.nan_to_num(column(run.all_full_lines, f"time/{name}"))
        if seconds.sum() > 0:
            phases[name] = seconds
    if not phases:
        return {}
    total = np.nan_to_num(column(run.all_full_lines, "time/total"))
    rest = total - sum(phases.values())
    if rest.max() > 0:
        phases["other"] = rest.clip(min=0)
    return phases
