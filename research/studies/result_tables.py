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
    if record["device"] == "CPU":
        return math.nan
    return record["seconds"]["total"] or math.nan


@dataclass(frozen=True)
class Measure:
    """A column of the tables."""

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
AT_EQUAL_REWARD = (
    " at equal reward"  # ends the name of a measure that is compared where the rewards are equal
)


def arms_of(plan: StudyPlan, name: str, study: Study, runs: Mapping[str, Record]) -> Arms:
    """The available results of a study, by arm and seed."""
    arms: dict[str, dict[int, Record]] = {arm: {} for arm in study.arms}
    for (owner, arm, seed), key in plan.keys.items():
        if owner == name and key in runs:
            arms[arm][seed] = runs[key]
    return arms


def comparable(arms: Arms) -> bool:
    """Whether more than one arm has results; a shared arm alone answers nothing."""
    return len(with_results(arms)) > 1


def with_results(arms: Arms) -> Arms:
    """The arms that have results."""
    return {arm: records for arm, records in arms.items() if records}


def at_equal_reward(record: Record, other: Record, key: str) -> float:
    """A gold metric at equal reward: where validation first reaches the highest reward that both runs reach.

    Interpolates linearly between validations; NaN if a run was stopped or never improved over the start.
    """
    if math.isnan(validated(record, key) + validated(other, key)):
        return math.nan
    rewards = validation_rewards(record)
    other_rewards = validation_rewards(other)
    level = min(float(np.nanmax(rewards)), float(np.nanmax(other_rewards)))
    if level <= max(rewards[0], other_rewards[0]):
        return math.nan
    return crossing(rewards, np.array(record["validation"][key], dtype=float), level)


def validation_rewards(record: Record) -> np.ndarray:
    """The total reward of each validation, under the weights of setting B."""
    scores = {name: np.array(record["validation"][f"reward/{name}"], float) for name in REWARD}
    return sum(weight * scores[name] for name, weight in REWARD.items())


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
    changes = {
        name: [measure.value(a) - measure.value(b) for a, b in pairs]
        for name, measure in MEASURES.items()
        if measure.better
    }
    keys = {"gold match": "gold/match", "gold prompt distance": "gold/prompt_distance"}
    for name, key in keys.items():
        changes[f"{name}{AT_EQUAL_REWARD}"] = [
            at_equal_reward(a, b, key) - at_equal_reward(b, a, key) for a, b in pairs
        ]
    return changes


@dataclass(frozen=True)
class Difference:
    """A measure of an arm minus that of its reference."""

    change: Interval
    pairs: int
    p: float  # corrected
    better: int  # as in Measure

    @property
    def verdict(self) -> int:
        """+1 better, -1 worse, 0 undecided."""
        return self.better * self.change.sign if self.p < LEVEL else 0


def comparisons(study: Study) -> int:
    """Number of differences that a study tests."""
    return sum(study.reference(arm) is not None for arm in study.arms)


def compared(study: Study, arms: Arms) -> dict[str, dict[str, Difference]]:
    """Differences by arm and measure; p-values are corrected per measure over all arms of the study, run or not."""
    changes: dict[str, dict[str, list[float]]] = {}
    for arm, records in arms.items():
        reference = study.reference(arm)
        if reference and records and arms[reference]:
            changes[arm] = differences(records, arms[reference])

    result: dict[str, dict[str, Difference]] = {arm: {} for arm in changes}
    for name in next(iter(changes.values()), {}):
        better = MEASURES[name.removesuffix(AT_EQUAL_REWARD)].better
        p_values = [p_value(values[name]) for values in changes.values()]
        corrected_p = corrected(p_values, comparisons(study))
        for (arm, values), p in zip(changes.items(), corrected_p, strict=True):
            pairs = sum(map(math.isfinite, values[name]))
            result[arm][name] = Difference(interval(values[name]), pairs, p, better)
    return result


def study_table(study: Study, arms: Arms) -> str:
    """Markdown tables of means and spreads, then differences, for arms with results; the others are listed."""
    changes = compared(study, arms)
    text = finding(study, changes) if changes else ""
    text += f"Mean ± standard deviation over seeds.\n\n{markdown(mean_rows(arms))}"
    if changes:
        asked = comparisons(study)
        over = f", p-values corrected over {asked} comparisons" if asked > 1 else ""
        rows = difference_rows(study, changes)
        text += f"\nPaired differences with 95 % intervals{over}.\n\n{markdown(rows)}"
    missing = [arm for arm, records in arms.items() if not records]
    if missing:
        text += f"\nNot run yet: {'; '.join(missing)}.\n"
    return text


def mean_rows(arms: Arms) -> list[list[str]]:
    """A row per arm with results: its number of runs, how many collapsed, and all measures."""
    rows = [["arm", "runs", "collapsed", *MEASURES]]
    for arm, records in with_results(arms).items():
        collapsed = sum(bool(record["collapsed"]) for record in records.values())
        cells = [spread(measure, records.values()) for measure in MEASURES.values()]
        rows.append([arm, str(len(records)), str(collapsed), *cells])
    return rows


def difference_rows(
    study: Study, changes: Mapping[str, Mapping[str, Difference]]
) -> list[list[str]]:
    """A row per difference; a cell names its number of pairs where it has fewer than the row."""
    rows = [["difference", "pairs", *next(iter(changes.values()))]]
    for arm, values in changes.items():
        pairs = max((difference.pairs for difference in values.values()), default=0)
        cells = []
        for name, difference in values.items():
            cell = shown(difference, MEASURES[name.removesuffix(AT_EQUAL_REWARD)].decimals)
            if 0 < difference.pairs < pairs:
                cell += f" ({difference.pairs} pairs)"
            cells.append(cell)
        rows.append([f"{arm} minus {study.reference(arm)}", str(pairs), *cells])
    return rows


def reached(study: Study, arms: Arms) -> str:
    """A table of how far from the base model each arm ended, and whether as far as the arm it is compared with."""
    low_ratio, high_ratio = MATCHED
    head = ["arm", "runs", "kl_weight", "path KL to the base model", "over that of the other arm"]
    rows = [[*head, "matched"]]
    logs = {
        arm: {seed: log_path_kl(record) for seed, record in records.items()}
        for arm, records in arms.items()
    }
    for arm, records in with_results(arms).items():
        arm_logs = logs[arm]
        other_logs = logs.get(study.reference(arm) or "", {})
        shared = sorted(arm_logs.keys() & other_logs.keys())
        change = interval([arm_logs[seed] - other_logs[seed] for seed in shared])
        ratio, low, high = (math.exp(change.mean + end) for end in (0.0, -change.half, change.half))
        cells = [number(ratio, 2), ""]
        if math.isfinite(low):
            matched = "yes" if low_ratio <= ratio <= high_ratio else "no"
            cells = [f"{ratio:.2f} ({low:.2f} to {high:.2f})", matched]
        weight = next(iter(records.values()))["config"]["kl_weight"]
        geometric_mean = math.exp(mean(np.array([*arm_logs.values()])))
        rows.append([arm, str(len(records)), f"{weight:g}", f"{geometric_mean:.3g}", *cells])
    return (
        "Geometric means over seeds, ratios by pairs with 95 % intervals; matched: from "
        f"{low_ratio:g} to {high_ratio:g}, otherwise a difference decides nothing about the arm.\n\n{markdown(rows)}"
    )


def log_path_kl(record: Record) -> float:
    """Log of the KL to the base model; NaN if there is none, or a policy that never moved."""
    return math.log(path_kl(record) or math.nan)


def finding(study: Study, changes: Mapping[str, Mapping[str, Difference]]) -> str:
    """What is decided of the measures, as the caption of the study's figure; without those at equal reward."""
    sentences = []
    for arm, measures in changes.items():
        decided = [
            f"{name} {number(difference.change.mean, MEASURES[name].decimals, '+')}"
            for name, difference in measures.items()
            if name in MEASURES and difference.verdict
        ]
        if decided:
            sentences.append(f"{arm} minus {study.reference(arm)}: {', '.join(decided)}")
    if not sentences:
        return "*No difference at the end is decided.*\n\n"
    return f"*Decided at the end: {'; '.join(sentences)}. All else there is undecided.*\n\n"


def spread(measure: Measure, records: Iterable[Record]) -> str:
    """Mean and standard deviation of a measure over the runs that have it."""
    values = np.array([value for value in map(measure.value, records) if math.isfinite(value)])
    if len(values) == 0:
        return number(math.nan, measure.decimals)
    text = number(float(values.mean()), measure.decimals)
    if len(values) > 1:
        text += f" ± {number(float(values.std(ddof=1)), measure.decimals)}"
    return text


def shown(difference: Difference, decimals: int) -> str:
    """The difference, its interval and the verdict; with fewer than 3 pairs there is no interval or verdict."""
    change = difference.change
    text = number(change.mean, decimals, "+")
    if math.isnan(change.half):
        return text
    low = number(change.mean - change.half, decimals, "+")
    high = number(change.mean + change.half, decimals, "+")
    return f"{text} ({low} to {high}), p {difference.p:.2g}: {VERDICTS[difference.verdict]}"


def table2(arms: Arms) -> str:
    """The paper's Table 2 on the embedded world: the base model, then each arm, with 95 % intervals over seeds."""
    columns: dict[str, tuple[Callable[..., float], int]] = {  # value of a record, decimals
        "Overall": (partial(weighted, weights=OVERALL), 3),
        "VQ": (partial(validated, key="reward/VQ"), 3),
        "MQ": (partial(validated, key="reward/MQ"), 3),
        "TA": (partial(validated, key="reward/TA"), 3),
        "gold match": (partial(validated, key="gold/match"), 3),
        "gold prompt distance": (partial(validated, key="gold/prompt_distance"), 4),
        "gold distance": (partial(validated, key="gold/distance"), 4),
    }
    rows = [["method", "runs", *columns]]
    every_run = [record for records in arms.values() for record in records.values()]
    if every_run:  # all start from the same clips
        first = every_run[0]
        start = [number(value(first, at=0), decimals) for value, decimals in columns.values()]
        rows.append(["base model", "", *start])
    for arm, records in with_results(arms).items():
        cells = []
        for value, decimals in columns.values():
            estimate = interval([value(record) for record in records.values()])
            cells.append(f"{number(estimate.mean, decimals)} ± {number(estimate.half, decimals)}")
        rows.append([arm, str(len(records)), *cells])
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
    scale = gradient_scale(schedule)[noisy]
    balance = equalizer(schedule)[noisy]
    kl = scale**2
    if config["use_kl_balancing"]:
        kl = kl * balance**2
    policy = scale
    if config["use_grad_balancing"]:
        policy = policy * balance
    return (kl.mean() / policy.mean()).item()


def per_step_table(
    plan: StudyPlan, studies: Mapping[str, Study], runs: Mapping[str, Record]
) -> str:
    """Means over runs and seeds: gradient norm and KL share per step, and clip fractions."""
    columns = (
        "1000 x norm of dL/dv by step",
        "% of the KL by step",
        "% clipped: A < 0, A > 0",
        "KL's pull",
    )
    rows = [["study", "arm", "runs", *columns]]
    for name in (name for name in PER_STEP if name in studies):
        arms = arms_of(plan, name, studies[name], runs)
        for arm in (arm for arm in PER_STEP[name] if arms[arm]):
            records = list(arms[arm].values())
            norms = step_values(records, "grad_v")
            kls = step_values(records, "kl_anchor")
            clipped = np.array([clip_fraction(records, key) for key in ("clip_low", "clip_high")])
            values = (1000 * norms, 100 * kls / np.nansum(kls), 100 * clipped)
            cells = [", ".join(number(value, 1) for value in cell) for cell in values]
            pull = number(kl_pull(records[0]["config"]), 2)
            rows.append([name, arm, str(len(records)), *cells, pull])
    return markdown(rows)


def step_values(records: Sequence[Record], key: str) -> np.ndarray:
    """A per-step metric, mean over runs, (T,)."""
    return np.array([[as_float(v) for v in record["per_step"][key]] for record in records]).mean(0)


def clip_fraction(records: Sequence[Record], key: str) -> float:
    """Mean of a clip fraction over iterations and runs."""
    return mean(np.array([mean(curve(record, f"policy/{key}")) for record in records]))


def origins(runs: Mapping[str, Record]) -> str:
    """Number of runs by device and commit."""
    counts = Counter(
        (record["device"], (record["versions"] or {}).get("torch"), record["commit"])
        for record in runs.values()
    )
    rows = [["device", "torch", "commit", "runs"]]
    for origin, count in sorted(counts.items(), key=str):
        rows.append([*map(str, origin), str(count)])
    return markdown(rows)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]) + "\n"


def tables(
    plan: StudyPlan,
    studies: Mapping[str, Study],
    runs: Mapping[str, Record],
    more: Mapping[str, Table] = NO_MORE,
) -> dict[str, str]:
    """Markdown for each study with something to compare; for `per_step` statistics, `runs`, and what `more` adds.

    more: by study, what comes after its tables; under other names, tables of their own, which get no arms.
    """
    made = {}
    for name, study in studies.items():
        arms = arms_of(plan, name, study, runs)
        if not comparable(arms):
            continue
        parts = [study_table(study, arms)]
        if name == "table2":
            parts.insert(0, table2(arms))
        if "path_kl" in study.measured:
            parts.append(reached(study, arms))
        if name in more:
            parts.append(more[name](arms, runs))
        made[name] = "\n".join(parts)
    if runs:
        made["per_step"] = per_step_table(plan, studies, runs)
        made["runs"] = origins(runs)
        made |= {name: table({}, runs) for name, table in more.items() if name not in studies}
    return made


def refreshed(page: str, made: Mapping[str, str]) -> str:
    """The page with each block between markers regenerated; a block without results says so."""

    def renewed(block: re.Match[str]) -> str:
        begin, name, end = block.groups()
        return begin + made.get(name, "No results yet.\n") + end

    return BLOCK.sub(renewed, page)


def first_page(
    studies: Mapping[str, Study], made: Mapping[str, str], figures: Mapping[str, str]
) -> str:
    """An initial page: the questions, their tables and figures, without interpretation."""
    parts = [f"# Results\n\n{NOTE}\n\n{LEGEND}\n"]
    for name in (name for name in made if name in studies):
        figure = f"![{name}]({figures[name]})\n\n" if name in figures else ""
        block = f"<!-- results {name} -->\n<!-- end of results -->\n"
        parts.append(f"## {studies[name].question}\n\n{figure}{block}")
    return refreshed("\n".join(parts), made)
