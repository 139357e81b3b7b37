"""Which figures a report has, and the words under them. What a run did not measure is left out."""

import numpy as np

from sage_grpo.tools.report_drawing import (
    GOLD,
    MAP,
    REFERENCE,
    SETTING,
    TRAIN,
    VALIDATION,
    WIDE,
    Panel,
    draw_curves,
    draw_map,
    draw_scatter,
    draw_schedule,
    draw_stack,
    draw_total,
    draw_watched,
    panel,
)
from sage_grpo.tools.run_folder import Run, column

PHASES = {
    "rollout": "#2f6690",
    "decode": "#7fa6c4",
    "reward": "#d9822b",
    "gold": "#3a7d5c",
    "anchor": "#c9b458",
    "update": "#8a5a83",
    "other": "#c3cad3",
}
UPDATES = {
    "KL": (
        {"kl/anchor": (TRAIN, "to the anchor"), "kl/rollout": (VALIDATION, "to the rollout")},
        True,
        "Distance of the policy from its anchor and from the policy that made the rollout. It should level off; to a "
        "moving anchor it is a saw-tooth. Exponential growth is a run-away.",
    ),
    "KL coefficient": (
        {"kl/coef": (SETTING, None)},
        True,
        "Weight of the KL in the loss: warm-up, then feedback. Stuck at a limit, it no longer controls anything.",
    ),
    "Clipped pairs": (
        {"policy/clip_high": (TRAIN, "A > 0, above"), "policy/clip_low": (VALIDATION, "A < 0, below")},
        False,
        "Share of (rollout, step) pairs that the clip silences; 0 with one update per rollout. Far more below than "
        "above: the KL has passed the clip range.",
    ),
    "Gradient norm": (
        {"policy/grad_norm": (TRAIN, None)},
        True,
        "Before clipping. Steady or slowly falling is healthy; a climb asks for a lower learning rate.",
    ),
    "Learning rate": ({"lr": (SETTING, None)}, False, "As the optimizer used it."),
    "Largest ratio deviation": (
        {"policy/ratio_max_deviation": (TRAIN, None)},
        True,
        "Largest |ratio - 1| of an iteration; exactly 0 with one update per rollout.",
    ),
}
MAPS = {
    "log_ratio_mean": (
        "Log-ratio",
        "Mean of log(new / old probability): minus the KL to the rollout, so 0 or slightly negative.",
    ),
    "clip_fraction": (
        "Clipped share",
        "Pairs whose ratio left the clip range. Dark rows are denoising steps that hardly learn.",
    ),
    "grad_v": (
        "Gradient at the velocity",
        "Norm of dL/dv, log scale. With the equalizer all rows look alike; without it the last steps dominate.",
    ),
    "kl_anchor": (
        "KL to the anchor",
        "Log scale. The last steps carry most of it, since their noise is smallest.",
    ),
}
SCHEDULE = {
    "Noise level": ({"sigmas": None}, "sigma before each denoising step, from 1 (pure noise) to 0 (the clip)."),
    "Exploration noise": ({"std": None}, "Standard deviation injected at each step; 0 is a deterministic step."),
    "Equalizer": (
        {"equalizer": "S, factor of the loss", "gradient_scale": "N, size of the gradient"},
        "S times N is the same at every step: all steps push equally hard.",
    ),
}


def reward_panels(run: Run) -> list[Panel]:
    perfect = run.head.get("perfect") or {}
    references = {name: ("perfect clips", value) for name, value in perfect.items() if value is not None}
    panels = []
    if run.measured("reward/total"):
        words = (
            "Weighted sum of the scores. Training explores with noise and validation does not, so their levels differ; "
            "both should rise, fast at first. A band that collapses leaves nothing to learn from."
        )
        panels.append(panel("Reward", words, draw_total, run, references.get("total"), size=WIDE))
    spread = {"reward/group_std": (TRAIN, "inside a group"), "reward/std": (REFERENCE, "over the batch")}
    if run.has(*spread):
        words = (
            "Spread of the reward between clips of one prompt: what advantages are made of. A slow decline is "
            "learning; near 0 exploration has died."
        )
        panels.append(panel("Exploration", words, draw_curves, run, spread))
    words = "Mean of this score. One that falls while the total rises is being traded away."
    for name in run.scores:
        if run.measured(f"reward/{name}"):
            args = (run, f"reward/{name}", TRAIN, references.get(name))
            panels.append(panel(name, words, draw_watched, *args))
    return panels


def gold_panels(run: Run) -> list[Panel]:
    panels = []
    if run.measured("gold/match"):
        words = "Share of clips that show all that their prompt names, as the oracle reads them. Higher is better."
        panels.append(panel("Match", words, draw_watched, run, "gold/match", GOLD, None))
    if run.measured("gold/distance"):
        floor = (run.head.get("vae_floor") or {}).get("distance")
        reference = None if floor is None else ("VAE alone", floor)
        words = "RMS pixel distance to the nearest true clip. Lower is better; a rise means leaving the manifold."
        panels.append(panel("Distance to the manifold", words, draw_watched, run, "gold/distance", GOLD, reference))
    key = next((key for key in ("gold/match", "gold/distance") if run.has(key)), None)
    if key and run.has("reward/total"):
        words = (
            "One dot per iteration. Dots should move right and towards better gold; reward up and gold down is "
            "reward hacking."
        )
        panels.append(panel("Gold against proxy", words, draw_scatter, run, key, x="reward in training"))
    return panels


def update_panels(run: Run) -> list[Panel]:
    return [
        panel(title, words, draw_curves, run, keys, logarithmic)
        for title, (keys, logarithmic, words) in UPDATES.items()
        if run.has(*keys)
    ]


def map_panels(run: Run) -> list[Panel]:
    return [
        panel(title, words, draw_map, run, key, size=MAP)
        for key, (title, words) in MAPS.items()
        if np.isfinite(run.grid(key)).any()
    ]


def schedule_panels(run: Run) -> list[Panel]:
    schedule = run.head.get("schedule") or {}
    return [
        panel(title, words, draw_schedule, schedule, keys, x="denoising step")
        for title, (keys, words) in SCHEDULE.items()
        if schedule.get(next(iter(keys)))
    ]


def time_panels(run: Run) -> list[Panel]:
    seconds = phase_seconds(run)
    words = (
        "Phases of each iteration, stacked, in the colours of the table. An even height is healthy; a slow climb is a "
        "leak or a busy machine."
    )
    args = (column(run.train, "step"), seconds, PHASES)
    return [panel("Time per iteration", words, draw_stack, *args, size=WIDE)] if seconds else []


def phase_seconds(run: Run) -> dict[str, np.ndarray]:
    """Seconds (N,) of each phase that took any; `other` is what time/total has beyond them."""
    phases = {name: column(run.train, f"time/{name}") for name in PHASES}
    phases = {name: np.nan_to_num(values) for name, values in phases.items() if np.nansum(values) > 0}
    rest = np.nan_to_num(column(run.train, "time/total")) - sum(phases.values())
    return phases | ({"other": rest.clip(min=0)} if phases and rest.max() > 0 else {})
