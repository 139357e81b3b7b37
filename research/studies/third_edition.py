"""The third edition of the studies: how many clips of a group to train, for GRPO, awm and nft at equal compute.

    python -m research.studies.third_edition --page                                 writes registration_3.md
    python -m research.studies.third_edition --list                                 lists studies, runs, core-minutes
    python -m research.studies.third_edition --jobs 16 --budget_minutes 9 --cut     runs all stages, as far as it gets
    python -m research.studies.third_edition --summary                              writes results_3.md with tables

One command goes through the stages in order: the searches for learning rates, the comparison, and guidance for the two
best. What is finished is in research/studies/records/third.jsonl and is never run again, so the command can be split
over any number of leases; it ends with 75 while runs are left. `--tiny --results FILE --work FOLDER` rehearses all of
it on a CPU. What is asked, measured and decided is registered before the runs: a test compares the committed
research/studies/registration_3.md with this file. All other flags are those of research.studies.ablate.
"""

import math
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from research.studies import ablate, compute, records
from research.studies import page as results_page
from research.studies.compute import MATCH, crossing, interval, ratio_of, validations, with_half
from research.studies.page import StudyFigure
from research.studies.questions import HERE, PUBLISHED, RECORDS, Flags, Study, StudyPlan
from research.studies.records import Record, as_float, validated
from research.studies.result_tables import Arms, Table, arms_of, markdown, with_results
from research.studies.second_edition import (
    BUDGET,
    GUIDED,
    METHODS,
    RATES,
    RAW,
    RECIPE,
    REPORTED,
    SEARCH,
    SEEDS,
    SETTINGS,
    affordable,
    choose,
    chosen,
    config_of,
    found_by_search,
    further,
    rated,
)
from sage_grpo.exit_codes import DONE, WRONG_INPUT
from sage_grpo.files.json_files import write_json
from sage_grpo.intervals import Interval
from sage_grpo.tools.figure_style import PALETTE

RESULTS = RECORDS / "third.jsonl"
PAGE = HERE / "registration_3.md"
SUMMARY = HERE / "results_3.md"
STAGES = ("rates", "further_rates", "clips", "guidance_rates", "further_guidance_rates", "guidance")
SEARCHES = ("rates", "guidance_rates")
NUM_VALIDATIONS = 8
ALGORITHMS: dict[str, Flags] = {
    "nft": METHODS["nft"],
    "awm": METHODS["awm"],
    "flash": METHODS["flash, 1 step per prompt"],
}
SHARES: dict[str, Flags] = {
    "all of 8": {},
    "4 of 8": {"train_clips": 4},
    "best and worst of 8": {"train_clips": 2},
    "best and worst of 16": {"train_clips": 2, "num_generations": 16},
}
REFERENCE = "nft, all of 8"
GOAL_MATCH = 0.9  # to which units are counted
GOAL_RATIO = 0.6  # of those of REFERENCE
MARGIN = 0.05  # by which match or spread may be lower: a seed that is run twice differs by as much
SPREAD = "classes if both match"
# a rehearsal: two arms, one seed, one iteration of 16 clips
TINY_ARMS = (REFERENCE, "flash, best and worst of 16")
TINY: dict[str, Any] = {
    "batch_size": 16,
    "prompts_per_forward": 1,
    "cuda_graphs": False,
    "device": "cpu",
    "max_steps": 1,
    "validation_interval": 1,
    "log_interval": 1,
    "num_validation_prompts": 1,
}


@cache
def arms() -> Mapping[str, Flags]:
    """Every algorithm with every share of its clips, as long as the budget of the second edition pays for."""
    published = config_of(PUBLISHED)
    budget = BUDGET * compute.units(published) * published.batch_size
    return {
        f"{algorithm}, {share}": often_validated(affordable({**flags, **trained}, budget))
        for algorithm, flags in ALGORITHMS.items()
        for share, trained in SHARES.items()
    }


def often_validated(flags: Flags) -> dict[str, Any]:
    """With enough validations to tell when a match is reached."""
    return {**flags, "validation_interval": -(-flags["max_steps"] // NUM_VALIDATIONS)}


def guided(best: Sequence[str]) -> dict[str, Flags]:
    """These arms and the reference, sampled with guidance; the same units pay for fewer updates."""
    published = config_of(PUBLISHED)
    budget = BUDGET * compute.units(published) * published.batch_size
    unguided = {
        f"{algorithm}, {share}": {**flags, **trained}
        for algorithm, flags in ALGORITHMS.items()
        for share, trained in SHARES.items()
    }
    return {
        f"{arm}, guided": often_validated(affordable({**unguided[arm], **GUIDED}, budget))
        for arm in dict.fromkeys((REFERENCE, *best))
    }


def two_best(
    results: Path, compared: Collection[str] | None = None, seeds: int = SEEDS
) -> list[str]:
    """The two arms with the highest mean match of those that never collapsed; empty until all runs are there.

    compared: the arms of the study, by default all.
    """
    runs = [run for run in records.read_all(results).values() if run["study"] == "clips"]
    by_arm: dict[str, list[Record]] = {arm: [] for arm in compared or arms()}
    for run in runs:
        by_arm[run["arm"]].append(run)
    if any(len(arm_runs) < seeds for arm_runs in by_arm.values()):
        return []
    sound = {
        arm: interval([validated(run, MATCH) for run in arm_runs]).mean
        for arm, arm_runs in by_arm.items()
        if not any(run["collapsed"] for run in arm_runs)
    }
    return sorted(sound, key=lambda arm: -sound[arm])[:2]


def studies(results: Path = RESULTS, tiny: bool = False) -> dict[str, Study]:
    """All studies, in the order in which they are run; those that wait for results have no arms yet."""
    rates = rates_file(results)
    seeds = 1 if tiny else SEEDS
    plain = {arm: flags for arm, flags in arms().items() if not tiny or arm in TINY_ARMS}
    best = two_best(results, plain, seeds)
    with_guidance = guided(best) if best else {}
    search = {"flags": REPORTED | RAW, **SEARCH}
    compared = {"flags": REPORTED | RAW, "seeds": seeds, "measured": ("spread",)}
    made = {
        "rates": Study("At which learning rate is each arm at its best?", rated(plain), **search),
        "further_rates": Study("And beyond the ends of that range?", further(plain, rates), **search),
        "clips": Study(
            "How many clips of a group should be trained?",
            {arm: {**flags, **chosen(arm, rates)} for arm, flags in plain.items()}, **compared,
        ),
        "guidance_rates": Study(
            "At which learning rate is each guided arm at its best?", rated(with_guidance), **search
        ),
        "further_guidance_rates": Study(
            "And beyond the ends of that range?", further(with_guidance, rates), **search
        ),
        "guidance": Study(
            "Is it the same with guidance, for the two best?",
            {arm: {**flags, **chosen(arm, rates)} for arm, flags in with_guidance.items()}, **compared,
        ),
    }  # fmt: skip
    if not tiny:
        return made
    return {name: rehearsed(study) for name, study in made.items()}


def rehearsed(study: Study) -> Study:
    """The study with runs of seconds."""
    shrunk = {arm: {**flags, **TINY} for arm, flags in study.arms.items()}
    return Study(study.question, shrunk, study.seeds, study.first_seed, study.flags, measured=())


def rates_file(results: Path) -> Path:
    """What the searches among these results found."""
    return results.with_name(f"{results.stem}_rates.json")


def page() -> str:
    """What is registered: every study with its arms, their length and their units."""
    lines = [
        REGISTERED,
        "## Arms",
        "",
        "| arm | flags | iterations | units per clip |",
        "|---|---|---|---|",
    ]
    for arm, flags in arms().items():
        config = config_of(REPORTED, RAW, flags)
        told = [f"{k} {v}" for k, v in flags.items() if not found_by_search("clips", k, v)]
        cost = compute.units(config)
        lines.append(f"| {arm} | {', '.join(told)} | {config.max_steps} | {cost:.1f} |")
    return "\n".join(lines).rstrip() + "\n"


NUM_ARMS = len(ALGORITHMS) * len(SHARES)
SEARCHED_RATES = ", ".join(f"{rate:g}" for rate in RATES)
REGISTERED = f"""# Registration of the third edition

`python -m research.studies.third_edition --page` writes this page, which is committed before the first run.

**Question.** All clips of a group are sampled and scored. How many of them should be trained (`train_clips`: the best
and the worst), for nft, awm and GRPO with a window of one step (flash), at equal compute?

**Runs** vary `configs/tiny_gpu.yaml` as the second edition does ({SETTINGS}),
with 16 prompts per forward and without averaged weights, which would lag by other shares of runs of other lengths. An
update has 128 clips: 16 prompts x 8, or 8 x 16 where a group has 16. A unit is one forward of one clip at full size;
every arm gets what {BUDGET} updates of the published method cost. Each run is validated at the start and at every
eighth of its length.

**Learning rates.** Each arm is run at {SEARCHED_RATES} with seed {SEARCH["first_seed"]}, which no result reports;
the rate with the highest last reward is taken, and if that is at an end, the arm is also run at the rate beyond, as in
the second edition.

**Studies**, in this order: `rates`, `further_rates` (the searches), `clips` (all arms, seeds 1 to {SEEDS}), then
`guidance_rates`, `further_guidance_rates` and `guidance` (guidance 2, seeds 1 to {SEEDS}) for the two arms of `clips`
with the highest mean gold match of the last validation, among those of which no run collapsed, and for *{REFERENCE}*.

**Measures**, per seed: gold match of the last validation; units until held-out prompts first have a match of
{GOAL_MATCH:g}, linearly between validations, where a run that never has it counts with all its units; reward; and the
spread of 16 prompts that leave size, speed and background open (research/studies/spread.py), among pairs of clips that
both match.

**Decisions.** Arms are compared with *{REFERENCE}*, by pairs of seeds. Seeds in which it never reaches the match leave
the comparison of units.

- *Cheaper.* The ratio of units, by logarithms. The goal, {GOAL_RATIO:g}, is **met** if the upper end of its 95 %
  interval is at most that, and **met on average** if its mean is.
- *No worse.* The lower end of the 95 % interval of the difference in match, and of that in spread, is above
  -{MARGIN:g}: the same seed run twice on a GPU differs by as much.
- An arm **wins** if it meets the goal and is no worse in both. If none does, the numbers are the result, and the nft
  recipes keep `train_clips 2` only if its arm is no worse in match and meets the goal on average.
- All other differences follow the rule of the second edition: 95 % interval and Holm's correction over the arms.

A collapsed run has no last validation, and is counted. Runs that fail for a reason of the machine are repeated.

**Budget.** {NUM_ARMS} arms: {3 * NUM_ARMS} runs of the search and some beyond its ends, {SEEDS * NUM_ARMS} that are
compared, and about {3 * len(RATES) + 3 * SEEDS} with guidance. In the second edition 106 runs of these units took 26
minutes with 18 processes on an H200; by that, this takes 40.
"""


def units_to_match(record: Record) -> float:
    """Units until held-out prompts first have GOAL_MATCH; NaN if they never have."""
    spent, matches = validations(record, MATCH)
    return crossing(matches, spent, GOAL_MATCH)


def log_ratios(runs: Mapping[int, Record], reference: Mapping[int, Record]) -> list[float]:
    """Logarithms of the units to GOAL_MATCH over the reference's, by seed; all units of a run that never has it."""
    logs = []
    for seed, base in reference.items():
        base_units = units_to_match(base)
        if seed in runs and base_units > 0:
            taken = units_to_match(runs[seed])
            logs.append(
                math.log((compute.budget(runs[seed]) if math.isnan(taken) else taken) / base_units)
            )
    return logs


def end_spread(record: Record) -> float:
    return as_float(record.get("spread", {}).get("end", {}).get(SPREAD))


def gaps(runs: Mapping[int, Record], reference: Mapping[int, Record], value: Any) -> Interval:
    """A value minus the reference's, over the seeds that both have."""
    return interval(
        [value(runs[seed]) - value(reference[seed]) for seed in runs.keys() & reference.keys()]
    )


def verdict(ratio: Interval, match: Interval, spread: Interval) -> str:
    """What the registration decides, from the logarithm of the ratio and the two differences."""
    goal = math.log(GOAL_RATIO)
    cheap = "not met"
    if ratio.mean + ratio.half <= goal:
        cheap = "met"
    elif ratio.mean <= goal:
        cheap = "met on average"
    worse = [
        name
        for name, gap in (("match", match), ("spread", spread))
        if not gap.mean - gap.half > -MARGIN
    ]
    if cheap == "met" and not worse:
        return "**wins**"
    return "; ".join([f"goal {cheap}", *(f"{name} may be worse" for name in worse)])


def goal_table(study_arms: Arms, _: Mapping[str, Record], reference: str = REFERENCE) -> str:
    """Every arm against the reference: match, units to the match, spread, and the verdict."""
    finished = with_results(study_arms)
    base = finished.get(reference)
    if not base:
        return "No results yet.\n"
    rows = [
        [
            "arm",
            "runs",
            "gold match",
            f"minus that of {reference}",
            f"reach {GOAL_MATCH:g}",
            "units to it, over the reference's",
            "spread minus the reference's",
            "verdict",
        ]
    ]
    for arm, runs in sorted(finished.items(), key=lambda item: -compute.match_of(item[1]).mean):
        reached = sum(units_to_match(run) > 0 for run in runs.values())
        cells = [arm, str(len(runs)), with_half(compute.match_of(runs))]
        if arm == reference:
            rows.append([*cells, "", str(reached), "1", "", ""])
            continue
        logs = log_ratios(runs, base)
        match = gaps(runs, base, compute.last_match)
        spread = gaps(runs, base, end_spread)
        ratio = ratio_of(logs) if logs else "–"
        cells += [with_half(match, 3, "+"), str(reached), ratio, with_half(spread, 3, "+")]
        rows.append([*cells, verdict(interval(logs), match, spread)])
    return f"{markdown(rows)}\n± and parentheses: 95 % intervals over seeds.\n"


def summary(results: Path, target: Path) -> int:
    """Write tables and figures of the results."""
    registered = studies(results)
    plan = StudyPlan(recipe=RECIPE, studies=registered)
    guided_reference = f"{REFERENCE}, guided"

    def spread(_: Arms, runs: Mapping[str, Record], study: str) -> str:
        return compute.spread_table(arms_of(plan, study, registered[study], runs))

    def search(_: Arms, runs: Mapping[str, Record], study: str) -> str:
        return compute.search_table(runs, (study, f"further_{study}"))

    tables: dict[str, Table] = {
        "clips": goal_table,
        "guidance": partial(goal_table, reference=guided_reference),
        "spread": partial(spread, study="clips"),
        "guided_spread": partial(spread, study="guidance"),
    }
    for name in SEARCHES:
        tables[f"searched_{name}"] = partial(search, study=name)
    figures = {}
    for name in ("clips", "guidance"):
        colors = dict(zip(registered[name].arms, PALETTE, strict=False))
        plot = partial(compute.draw_compute, colors=colors)
        figures[name] = StudyFigure(plot, (1, 3), colors=colors)
    arguments = ["--recipe", str(RECIPE), "--results", str(results), "--page", str(target)]
    return results_page.main(arguments, registered, figures, tables)


def run_stages(options: Any, passed_on: Sequence[str]) -> int:
    """Run the stages one after another, until all is done or the budget ends."""
    deadline = time.monotonic() + 60 * options.budget_minutes
    for stage in STAGES:
        registered = studies(options.results, options.tiny)
        if not registered[stage].arms:
            continue
        minutes = (deadline - time.monotonic()) / 60
        words = ["--studies", stage, "--budget_minutes", str(minutes), *passed_on]
        print(f"{stage}:", flush=True)
        code = ablate.main(words, registered)
        write_json(rates_file(options.results), choose(options.results, SEARCHES))
        if code != DONE:
            return code
    return DONE


def main(arguments: Sequence[str]) -> int:
    parser = ablate.new_parser(__doc__)
    parser.set_defaults(recipe=RECIPE, results=RESULTS, work=HERE.parents[1] / "outputs" / "third")
    add = parser.add_argument
    add("--page", action="store_true", help="write research/studies/registration_3.md")
    add("--summary", action="store_true", help="write tables and figures: results_3.md")
    add("--tiny", action="store_true", help="rehearse every stage with runs of seconds on a CPU")
    options = parser.parse_args(arguments)
    if options.page:
        PAGE.write_text(page(), encoding="utf-8")
        return DONE
    if options.summary:
        return summary(options.results, SUMMARY)
    if options.tiny and options.results == RESULTS:
        print("third_edition.py: a rehearsal is no result: give --results FILE", file=sys.stderr)
        return WRONG_INPUT
    if options.studies:
        print(
            "third_edition.py: the stages run in their order; leave --studies out", file=sys.stderr
        )
        return WRONG_INPUT

    places = ["--recipe", str(options.recipe), "--results", str(options.results)]
    places += ["--work", str(options.work), "--jobs", str(options.jobs)]
    if options.commit:
        places += ["--commit", options.commit]
    if options.seeds:
        places += ["--seeds", str(options.seeds)]
    if options.cut:
        places += ["--cut"]
    if options.list:
        return ablate.main([*places, "--list"], studies(options.results, options.tiny))
    return run_stages(options, places)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
