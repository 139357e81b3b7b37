"""Turns results into tables: each arm of a study, and its difference from the arm it is compared with.

Runs are paired by seed. A difference has its 95 % interval by Student's t over pairs. It counts as better or worse only
if this interval leaves out 0 and its p-value, corrected by Holm over the arms of the study, is below 0.05; all else is
undecided. A run that training had to stop has no last validation: it leaves the pairs and is counted as collapsed. So
is one whose last validation, against its first, has a reward lower by more than two standard errors of the clips, or a
distance to the manifold half as large again. Gold metrics at equal reward are compared in pairs in which both runs
gained.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from research.studies.kl_strategies import MATCHED
from research.studies.questions import Study, StudyPlan
from research.studies.records import Record, as_float, curve, mean, path_kl, schedule_of, validated
from research.studies.statistics import corrected, p_value
from sage_grpo.algo.equalizer import equalizer, gradient_scale
from sage_grpo.intervals import Interval, interval
from sage_grpo.tools.paired import number

LEVEL = 0.05
BLOCK = re.compile(r"(<!-- results (\w+) -->\n).*?(<!-- end of results -->)", re.DOTALL)
REWARD = {"VQ": 0.5, "MQ": 0.5, "TA": 1.0}  # the paper's setting B, the default
OVERALL = {"VQ": 1.0, "MQ": 1.0, "TA": 1.0}
NOTE = __doc__.partition("\n\n")[2].strip().replace("\n", " ")
LEGEND = (
    "In the figures, the upper panels show the differences of the tables with their 95 % intervals over seeds, filled "
    "where they are decided. Below are means over seeds: lines are running means of training, whose clips carry "
    "exploration noise; dots, those of the arms side by side, are validation, without noise."
)


def late(record: Record, key: str) -> float:
    """Mean of a training metric over the last third of the run."""
    values = curve(record, key)
    return mean(values[-(len(values) // 3 or 1) :])


def weighted(record: Record, weights: Mapping[str, float], at: int = -1) -> float:
    """A validation's total score under weights common to all runs, whatever the run used."""
    return sum(weight * validated(record, f"reward/{name}", at) for name, weight in weights.items())


def seconds(record: Record) -> float:
    """Seconds per iteration on a GPU; NaN on a CPU, because CPUs vary too much."""
    return math.nan if record["device"] == "CPU" else record["seconds"]["total"] or math.nan


@dataclass(frozen=True)
class Measure:
    value: Callable[[Record], float]
    better: int = 0  # +1 if higher is better, -1 if lower is, 0 if neither
    decimals: int = 3


MEASURES = {  # from the last validation, then from training
    "reward": Measure(partial(weighted, weights=REWARD), 1),
    "gold match": Measure(partial(validated, key="gold/match"), 1),
    "gold prompt distance": Measure(partial(validated, key="gold/prompt_distance"), -1, 4),
    "gold distance": Measure(partial(validated, key="gold/distance"), -1, 4),
    "exploration": Measure(partial(late, key="reward/group_std")),
    "KL to the anchor": Measure(partial(late, key="kl/anchor"), decimals=6),
    "seconds an iteration on a GPU": Measure(seconds, decimals=2),
}
VERDICTS = {1: "**better**", -1: "**worse**", 0: "undecided"}

Arms = Mapping[str, Mapping[int, Record]]  # arm -> seed -> results
Table = Callable[[Arms, Mapping[str, Record]], str]
NO_MORE: Mapping[str, Table] = {}


def arms_of(plan: StudyPlan, name: str, study: Study, found: Mapping[str, Record]) -> Arms:
    """The available results of a study, by arm and seed."""
    arms: dict[str, dict[int, Record]] = {arm: {} for arm in study.arms}
    for (owner, arm, seed), key in plan.keys.items():
        if owner == name and key in found:
            arms[arm][seed] = found[key]
    return arms


def comparable(arms: Arms) -> bool:
    """Whether more than one arm has results; a shared arm alone answers nothing."""
    return sum(map(bool, arms.values())) > 1


def at_equal_reward(record: Record, other: Record, key: str) -> float:
    """A gold metric at equal reward: where validation first reaches the highest reward that both runs reach.

    Interpolates linearly between validations; NaN if a run was stopped or never improved over the start.
    """
    if math.isnan(validated(record, key) + validated(other, key)):
        return math.nan
    rewards = [
        sum(w * np.array(r["validation"][f"reward/{name}"], float) for name, w in REWARD.items())
        for r in (record, other)
    ]
    level = min(float(np.nanmax(values)) for values in rewards)
    if level <= max(values[0] for values in rewards):
        return math.nan
    return crossing(rewards[0], np.array(record["validation"][key], dtype=float), level)


def crossing(rewards: np.ndarray, values: np.ndarray, level: float) -> float:
    """A value where the reward first is at `level`, linearly between validations; NaN if it never is."""
    for i in range(len(rewards) - 1):
        low, high = rewards[i], rewards[i + 1]
        if min(low, high) <= level <= max(low, high) and low != high:
            return float(values[i] + (values[i + 1] - values[i]) * (level - low) / (high - low))
    return math.nan


def differences(
    arm: Mapping[int, Record], reference: Mapping[int, Record]
) -> dict[str, list[float]]:
    """Arm minus reference, by measure, one value per seed that both have."""
    pairs = [(arm[seed], reference[seed]) for seed in sorted(arm.keys() & reference.keys())]
    found = {
        name: [m.value(a) - m.value(b) for a, b in pairs]
        for name, m in MEASURES.items()
        if m.better
    }
    for name, key in (
        ("gold match", "gold/match"),
        ("gold prompt distance", "gold/prompt_distance"),
    ):
        equal = [at_equal_reward(a, b, key) - at_equal_reward(b, a, key) for a, b in pairs]
        found[f"{name} at equal reward"] = equal
    return found


@dataclass(frozen=True)
class Difference:
    of: Interval
    pairs: int
    p: float  # corrected
    better: int

    @property
    def verdict(self) -> int:
        """+1 better, -1 worse, 0 undecided."""
        return self.better * self.of.sign if self.p < LEVEL else 0


def comparisons(study: Study) -> int:
    """Number of differences that a study tests."""
    return sum(study.reference(arm) is not None for arm in study.arms)


def compared(study: Study, arms: Arms) -> dict[str, dict[str, Difference]]:
    """Differences by arm and measure; p-values are corrected per measure over all arms of the study, run or not."""
    asked = {
        arm: differences(arms[arm], arms[reference])
        for arm in arms
        if (reference := study.reference(arm)) and arms[arm] and arms[reference]
    }
    result: dict[str, dict[str, Difference]] = {arm: {} for arm in asked}
    for name in next(iter(asked.values()), {}):
        better = MEASURES[name.removesuffix(" at equal reward")].better
        found = corrected([p_value(values[name]) for values in asked.values()], comparisons(study))
        for (arm, values), p in zip(asked.items(), found, strict=True):
            pairs = sum(map(math.isfinite, values[name]))
            result[arm][name] = Difference(interval(values[name]), pairs, p, better)
    return result


def study_table(study: Study, arms: Arms) -> str:
    """Markdown tables of means and spreads, then differences, for arms with results; the others are listed."""
    rows = [["arm", "runs", "collapsed", *MEASURES]]
    missing = [arm for arm, records in arms.items() if not records]
    for arm, records in ((arm, records) for arm, records in arms.items() if records):
        collapsed = sum(bool(record["collapsed"]) for record in records.values())
        rows.append(
            [
                arm,
                str(len(records)),
                str(collapsed),
                *(spread(m, records.values()) for m in MEASURES.values()),
            ]
        )
    found = compared(study, arms)
    text = (
        (finding(study, found) if found else "")
        + "Mean ± standard deviation over seeds.\n\n"
        + markdown(rows)
    )
    names = list(next(iter(found.values()), {}))
    rows = [["difference", "pairs", *names]]
    for arm, values in found.items():
        pairs = max((d.pairs for d in values.values()), default=0)
        cells = [
            shown(d, MEASURES[name.removesuffix(" at equal reward")].decimals)
            + (f" ({d.pairs} pairs)" if 0 < d.pairs < pairs else "")
            for name, d in values.items()
        ]
        rows.append([f"{arm} minus {study.reference(arm)}", str(pairs), *cells])
    if found:
        asked = comparisons(study)
        over = f", p-values corrected over {asked} comparisons" if asked > 1 else ""
        text += f"\nPaired differences with 95 % intervals{over}.\n\n{markdown(rows)}"
    return text + (f"\nNot run yet: {'; '.join(missing)}.\n" if missing else "")


def reached(study: Study, arms: Arms) -> str:
    """A table of how far from the base model each arm ended, and whether as far as the arm it is compared with."""
    rows = [
        [
            "arm",
            "runs",
            "kl_weight",
            "path KL to the base model",
            "over that of the other arm",
            "matched",
        ]
    ]
    logs = {
        arm: {seed: log_path_kl(record) for seed, record in records.items()}
        for arm, records in arms.items()
    }
    for arm, own in ((arm, own) for arm, own in logs.items() if own):
        other = logs.get(study.reference(arm) or "", {})
        change = interval([own[seed] - other[seed] for seed in sorted(own.keys() & other.keys())])
        ratio, low, high = (math.exp(change.mean + end) for end in (0.0, -change.half, change.half))
        cells = [number(ratio, 2), ""]
        if math.isfinite(low):
            cells = [
                f"{ratio:.2f} ({low:.2f} to {high:.2f})",
                "yes" if MATCHED[0] <= ratio <= MATCHED[1] else "no",
            ]
        weight, middle = (
            next(iter(arms[arm].values()))["config"]["kl_weight"],
            mean(np.array([*own.values()])),
        )
        rows.append([arm, str(len(own)), f"{weight:g}", f"{math.exp(middle):.3g}", *cells])
    matched = f"matched: from {MATCHED[0]:g} to {MATCHED[1]:g}, otherwise a difference decides nothing about the arm"
    return f"Geometric means over seeds, ratios by pairs with 95 % intervals; {matched}.\n\n{markdown(rows)}"


def log_path_kl(record: Record) -> float:
    """Log of the KL to the base model; NaN if there is none, or a policy that never moved."""
    return math.log(path_kl(record) or math.nan)


def finding(study: Study, found: Mapping[str, Mapping[str, Difference]]) -> str:
    """What is decided of the measures, as the caption of the study's figure; without those at equal reward."""
    said = []
    for arm, measures in found.items():
        decided = {
            name: d.of.mean for name, d in measures.items() if name in MEASURES and d.verdict
        }
        words = [
            f"{name} {number(mean, MEASURES[name].decimals, '+')}" for name, mean in decided.items()
        ]
        said += [f"{arm} minus {study.reference(arm)}: {', '.join(words)}"] if words else []
    if not said:
        return "*No difference at the end is decided.*\n\n"
    return f"*Decided at the end: {'; '.join(said)}. All else there is undecided.*\n\n"


def spread(measure: Measure, records: Iterable[Record]) -> str:
    values = np.array([value for value in map(measure.value, records) if math.isfinite(value)])
    middle = number(float(values.mean()) if len(values) else math.nan, measure.decimals)
    return (
        middle
        if len(values) < 2
        else f"{middle} ± {number(float(values.std(ddof=1)), measure.decimals)}"
    )


def shown(difference: Difference, decimals: int) -> str:
    """The difference, its interval and the verdict; with fewer than 3 pairs there is no interval or verdict."""
    middle = number(difference.of.mean, decimals, "+")
    if math.isnan(difference.of.half):
        return middle
    ends = " to ".join(
        number(difference.of.mean + end, decimals, "+")
        for end in (-difference.of.half, difference.of.half)
    )
    return f"{middle} ({ends}), p {difference.p:.2g}: {VERDICTS[difference.verdict]}"


def table2(arms: Arms) -> str:
    """The paper's Table 2 on the embedded world: the base model, then each arm, with 95 % intervals over seeds."""
    columns: dict[str, tuple[Callable[..., float], int]] = {
        "Overall": (partial(weighted, weights=OVERALL), 3)
    }
    columns |= {name: (partial(validated, key=f"reward/{name}"), 3) for name in ("VQ", "MQ", "TA")}
    columns |= {"gold match": (partial(validated, key="gold/match"), 3)}
    columns |= {"gold prompt distance": (partial(validated, key="gold/prompt_distance"), 4)}
    columns |= {"gold distance": (partial(validated, key="gold/distance"), 4)}
    rows = [["method", "runs", *columns]]
    records = [record for found in arms.values() for record in found.values()]
    if records:  # all runs start from the same clips
        rows.append(
            [
                "base model",
                "",
                *(number(value(records[0], at=0), digits) for value, digits in columns.values()),
            ]
        )
    for arm, found in ((arm, found) for arm, found in arms.items() if found):
        cells = [
            interval([value(record) for record in found.values()]) for value, _ in columns.values()
        ]
        digits = [decimals for _, decimals in columns.values()]
        shown = [
            f"{number(c.mean, d)} ± {number(c.half, d)}" for c, d in zip(cells, digits, strict=True)
        ]
        rows.append([arm, str(len(found)), *shown])
    return "Mean ± half of the 95 % interval over seeds.\n\n" + markdown(rows)


PER_STEP = {  # arms with the most informative per-step statistics
    "last_step": ("all but last", "all"), "equalizer": ("off",), "updates": ("2", "4"), "kl_steps": ("0.3 balanced",),
    "sde": ("dance", "precise"), "energy": ("dance", "precise"), "eta": ("0.3",),
    "strategies": ("fixed", "dual moving"), "ratio_norm": ("on",),
}  # fmt: skip


def kl_pull(config: Mapping[str, Any]) -> float:
    """Strength of the KL relative to the policy loss, at weight 1 and equal velocity change in every step."""
    schedule = schedule_of(config)
    noisy = schedule.stochastic
    scale, balance = gradient_scale(schedule)[noisy], equalizer(schedule)[noisy]
    kl = scale**2 * (balance**2 if config["use_kl_balancing"] else 1.0)
    return (kl.mean() / (scale * (balance if config["use_grad_balancing"] else 1.0)).mean()).item()


def per_step_table(
    plan: StudyPlan, studies: Mapping[str, Study], found: Mapping[str, Record]
) -> str:
    """Means over runs and seeds: gradient norm and KL share per step, and clip fractions."""
    columns = (
        "1000 x norm of dL/dv by step",
        "% of the KL by step",
        "% clipped: A < 0, A > 0",
        "KL's pull",
    )
    rows = [["study", "arm", "runs", *columns]]
    for name, arms in (
        (name, arms_of(plan, name, studies[name], found)) for name in PER_STEP if name in studies
    ):
        for arm, records in (
            (arm, list(arms[arm].values())) for arm in PER_STEP[name] if arms[arm]
        ):
            norms, kls = (
                np.array(
                    [[as_float(v) for v in record["per_step"][key]] for record in records]
                ).mean(0)
                for key in ("grad_v", "kl_anchor")
            )
            clipped = (
                mean(np.array([mean(curve(r, f"policy/{key}")) for r in records]))
                for key in ("clip_low", "clip_high")
            )
            cells = (1000 * norms, 100 * kls / np.nansum(kls), 100 * np.array(list(clipped)))
            words = (", ".join(number(v, 1) for v in cell) for cell in cells)
            rows.append(
                [name, arm, str(len(records)), *words, number(kl_pull(records[0]["config"]), 2)]
            )
    return markdown(rows)


def origins(found: Mapping[str, Record]) -> str:
    """Number of runs by device and commit."""
    counted = Counter(
        (r["device"], (r["versions"] or {}).get("torch"), r["commit"]) for r in found.values()
    )
    rows = [["device", "torch", "commit", "runs"]]
    return markdown(
        rows + [[*map(str, key), str(count)] for key, count in sorted(counted.items(), key=str)]
    )


def markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]) + "\n"


def tables(
    plan: StudyPlan,
    studies: Mapping[str, Study],
    found: Mapping[str, Record],
    more: Mapping[str, Table] = NO_MORE,
) -> dict[str, str]:
    """Markdown for each study with something to compare; for `per_step` statistics, `runs`, and what `more` adds.

    more: by study, what comes after its tables; under other names, tables of their own, which get no arms.
    """
    made = {}
    for name, study in studies.items():
        arms = arms_of(plan, name, study, found)
        if comparable(arms):
            made[name] = (table2(arms) + "\n" if name == "table2" else "") + study_table(
                study, arms
            )
            made[name] += "\n" + reached(study, arms) if "path_kl" in study.measured else ""
            made[name] += "\n" + more[name](arms, found) if name in more else ""
    if found:
        made |= {"per_step": per_step_table(plan, studies, found), "runs": origins(found)}
        made |= {name: table({}, found) for name, table in more.items() if name not in studies}
    return made


def refreshed(page: str, made: Mapping[str, str]) -> str:
    """The page with each block between markers regenerated; a block without results says so."""
    return BLOCK.sub(
        lambda block: block[1] + made.get(block[2], "No results yet.\n") + block[3], page
    )


def first_page(
    studies: Mapping[str, Study], made: Mapping[str, str], figures: Mapping[str, str]
) -> str:
    """An initial page: the questions, their tables and figures, without interpretation."""
    parts = [f"# Results\n\n{NOTE}\n\n{LEGEND}\n"]
    for name in (name for name in made if name in studies):
        picture = f"![{name}]({figures[name]})\n\n" if name in figures else ""
        parts.append(
            f"## {studies[name].question}\n\n{picture}<!-- results {name} -->\n<!-- end of results -->\n"
        )
    return refreshed("\n".join(parts), made)
