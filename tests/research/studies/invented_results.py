"""Made-up results with known numbers, so that the expected tables are known."""

import numpy as np

from research.studies.questions import digest, identity
from research.studies.records import CURVES, PER_STEP, PHASES, VALIDATED

START = {
    "reward/VQ": 0.4,
    "reward/MQ": 0.4,
    "reward/TA": 0.2,
    "gold/match": 0.6,
    "gold/distance": 0.05,
}


def invented(run, gain=0.3, match=0.6, distance=0.05, collapsed="", steps=None):
    """A record whose reward rises by `gain`, evenly over VQ, MQ and TA, and whose gold metrics end as told."""
    config = identity(run.config)
    last = config["max_steps"]
    ends = {f"reward/{name}": START[f"reward/{name}"] + gain / 2 for name in ("VQ", "MQ", "TA")}
    ends |= {"gold/match": match, "gold/distance": distance}
    lines = [
        {key: START[key] + (value - START[key]) * share for key, value in ends.items()}
        for share in (0, 0.5, 1)
    ]
    for line in lines:
        line["reward/total"] = 0.5 * line["reward/VQ"] + 0.5 * line["reward/MQ"] + line["reward/TA"]
        line["gold/prompt_distance"] = line["gold/distance"]
    validation = {name: [line[name] for line in lines] for name in VALIDATED}
    validation |= {f"{name}_stderr": [0.01] * 3 for name in VALIDATED}
    validation["step"] = [0, last // 2, last]
    if collapsed:
        validation = {name: values[:2] for name, values in validation.items()}
    steps = steps or list(range(3, last + 1, 3))
    curves = dict.fromkeys(CURVES, 0.1) | {
        "reward/total": np.linspace(0.6, 0.6 + gain, len(steps)).round(5).tolist()
    }
    per_step = {name: [1.0, 2.0, 4.0, 8.0, None] for name in PER_STEP}
    return {
        "study": run.study, "arm": run.arm, "seed": run.seed, "commit": "abc", "versions": {}, "device": "CPU",
        "digest": digest(config), "config": config, "steps": steps, "curves": curves, "validation": validation,
        "per_step": per_step, "seconds": dict.fromkeys(PHASES, 1.5), "collapsed": collapsed,
    }  # fmt: skip
