"""The third edition of the studies: what nft, awm and GRPO should train, and what nft should sample, at equal compute.

    python -m research.studies.third_edition --page                                 writes registration_3.md
    python -m research.studies.third_edition --list                                 lists studies, runs, core-minutes
    python -m research.studies.third_edition --jobs 16 --budget_minutes 9 --cut     runs all stages, as far as it gets
    python -m research.studies.third_edition --summary                              writes results_3.md with tables

One command goes through the stages in order: the searches for learning rates; how many clips of a group to train, with
cheaper samplers and more variety for nft behind it; and guidance for the two best. What is finished is in
research/studies/records/third.jsonl and is never run again, so the command can be split over any number of leases; it
ends with 75 while runs are left. `--tiny --results FILE --work FOLDER` rehearses all of it on a CPU. What is asked,
measured and decided is registered before the runs: a test compares the committed research/studies/registration_3.md
with this file. research/studies/third_tables.py makes tables, figures and decisions. All other flags are those of
research.studies.ablate.
"""

import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from research.studies import ablate, compute, records, third_tables
from research.studies import page as results_page
from research.studies.compute import MATCH, interval
from research.studies.page import StudyFigure
from research.studies.questions import HERE, PUBLISHED, RECORDS, Flags, Study, StudyPlan
from research.studies.records import Record, validated
from research.studies.result_tables import Arms, Table, arms_of
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
    lasting,
    rated,
)
from research.studies.third_tables import GOAL_MATCH, GOAL_RATIO, MARGIN
from sage_grpo.exit_codes import DONE, FAILED, WRONG_INPUT
from sage_grpo.files.json_files import write_json
from sage_grpo.tools.figure_style import PALETTE

RESULTS = RECORDS / "third.jsonl"
PAGE = HERE / "registration_3.md"
SUMMARY = HERE / "results_3.md"
# Studies of one stage are run together, the first of them first: the next fills slots that its last runs leave free.
STAGES = (
    ("rates",),
    ("further_rates", "clips"),  # `beside_the_search`
    ("clips", "averaged", "centering", "samplers", "variety"),
    ("variety_check", "guidance_rates"),
    ("further_guidance_rates",),
    ("guidance",),
)
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
    "best and worst of 8, not centered": {"train_clips": 2, "center_trained": False},
}
NOT_CENTERED = tuple(f"{algorithm}, best and worst of 8, not centered" for algorithm in ALGORITHMS)
REFERENCE = "nft, all of 8"
FIRST_SEEDS = 4  # of `clips`, run beside the further search
TODAY = REFERENCE  # what samplers and variety start from, as the full-size recipes of nft do
CHEAPER = "nft, best and worst of 8"
FEW_SEEDS = 4  # of centering, samplers and variety
# Averaged weights that lag by as many units: 20 updates, as in configs/tiny_gpu.yaml, or 39 cheaper ones
DECAYS = {REFERENCE: 0.95, CHEAPER: 0.974}

# How rollouts are sampled. From pure noise, dpm3 in 4 steps is dpm, and dpm in 3 steps is Euler's method.
TODAYS_SAMPLER = "dpm, 5 steps"
GUIDED_SAMPLER = "dpm, 5 steps, guided"
SAMPLERS: dict[str, Flags] = {
    TODAYS_SAMPLER: {},
    "dpm, 10 steps": {"tail_steps": 10},
    "dpm3, 5 steps": {"tail_solver": "dpm3"},
    "unipc, 5 steps": {"tail_solver": "unipc"},
    "dpm, 4 steps": {"tail_steps": 4},
    "unipc, 4 steps": {"tail_steps": 4, "tail_solver": "unipc"},
    "euler, 3 steps": {"tail_steps": 3},
    "unipc, 3 steps": {"tail_steps": 3, "tail_solver": "unipc"},
    GUIDED_SAMPLER: GUIDED,
    "dpm, 5 steps, guided above 0.8": GUIDED | {"guidance_interval": "0.8:1"},
}
COMPARED_SAMPLERS = {  # with which
    arm: GUIDED_SAMPLER if "guided" in arm else TODAYS_SAMPLER
    for arm in SAMPLERS
    if arm not in (TODAYS_SAMPLER, GUIDED_SAMPLER)
}

# Points of the trade-off of match and spread: flags that differ from TODAY, at equal units
TODAYS_POINT = "all of 8"
ANCHORS: dict[str, Flags] = {
    **{f"KL weight {weight:g}": {"kl_weight": weight} for weight in (1.0, 3.0, 10.0)},
    **{
        f"fixed anchor, KL weight {weight:g}": {"use_moving_KL": False, "kl_weight": weight}
        for weight in (0.03, 0.1, 0.3)
    },
}
FEWER_UPDATES = {"half of the updates": 2, "a quarter of the updates": 4}  # divisors
SHARED_POINTS = (
    "best and worst of 8",
    "best and worst of 16",
)  # arms of `clips`, at their own rates
CURVES = (  # of the trade-off: points that one knob leads through
    (TODAYS_POINT, *(arm for arm in ANCHORS if arm.startswith("KL"))),
    tuple(arm for arm in ANCHORS if arm.startswith("fixed")),
    (TODAYS_POINT, *FEWER_UPDATES),
    *((arm,) for arm in SHARED_POINTS),
)

# a rehearsal: some arms, one seed, one iteration of 16 clips
TINY_ARMS = (
    REFERENCE,
    CHEAPER,
    "flash, best and worst of 16",
    f"{CHEAPER}, averaged",
    TODAYS_SAMPLER,
    "unipc, 3 steps",
    "dpm, 5 steps, guided above 0.8",
    TODAYS_POINT,
    "KL weight 3",
    "fixed anchor, KL weight 0.1",
)
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
def methods() -> Mapping[str, Flags]:
    """Every algorithm with every share of its clips, of no length yet."""
    return {
        f"{algorithm}, {share}": {**flags, **trained}
        for algorithm, flags in ALGORITHMS.items()
        for share, trained in SHARES.items()
    }


@cache
def budget() -> float:
    """Units of every run that is compared at equal units."""
    published = config_of(PUBLISHED)
    return BUDGET * compute.units(published) * published.batch_size


def often_validated(flags: Flags) -> dict[str, Any]:
    """With enough validations to tell when a match is reached."""
    return {**flags, "validation_interval": -(-flags["max_steps"] // NUM_VALIDATIONS)}


def equal_units(flags: Flags) -> dict[str, Any]:
    """These flags with as many iterations as the budget pays for."""
    return often_validated(affordable(flags, budget()))


@cache
def arms() -> Mapping[str, Flags]:
    """Every algorithm with every share of its clips, at equal units."""
    return {arm: equal_units(flags) for arm, flags in methods().items()}


def guided(best: Sequence[str]) -> dict[str, Flags]:
    """These arms and the reference, sampled with guidance; the same units pay for fewer updates."""
    return {
        guided_arm(arm): equal_units({**methods()[arm], **GUIDED})
        for arm in dict.fromkeys((REFERENCE, *best))
    }


def guided_arm(arm: str) -> str:
    return f"{arm}, guided"


def compared_arms() -> dict[str, Flags]:
    """The arms of `clips`. Those that are not centered are there for the decision about centering alone."""
    return {arm: flags for arm, flags in arms().items() if arm not in NOT_CENTERED}


def centered_pairs() -> dict[str, str]:
    """The centered arms of `centering`, each with the arm that differs in nothing else but its searched rate."""
    return {arm.removesuffix(", not centered"): arm for arm in NOT_CENTERED}


def paired_arms() -> dict[str, Flags]:
    """The arms of `centering`."""
    return {arm: arms()[arm] for pair in centered_pairs().items() for arm in pair}


def averaged_arm(arm: str) -> str:
    return f"{arm}, averaged"


def averaged_pairs() -> dict[str, str]:
    """The arms of `averaged` with averaged weights, each with the arm that differs in nothing else."""
    return {averaged_arm(arm): arm for arm in DECAYS}


def averaged_arms(rates: Path) -> dict[str, Flags]:
    """The arms of `averaged`, at the rates found without averaging; those of `clips` are shared."""
    found = {arm: {**arms()[arm], **chosen(arm, rates)} for arm in DECAYS}
    averaged = {
        averaged_arm(arm): found[arm] | {"ema_decay": decay} for arm, decay in DECAYS.items()
    }
    return found | averaged


@cache
def sampled() -> Mapping[str, Flags]:
    """TODAY by every sampler; a cheaper one gets more updates."""
    return {arm: equal_units({**methods()[TODAY], **flags}) for arm, flags in SAMPLERS.items()}


@cache
def points() -> Mapping[str, Flags]:
    """TODAY and what may give its clips more variety."""
    today = arms()[TODAY]
    fewer = {
        arm: often_validated({**today, **lasting(today["max_steps"] // divisor)})
        for arm, divisor in FEWER_UPDATES.items()
    }
    anchored = {arm: {**today, **flags} for arm, flags in ANCHORS.items()}
    shared = {share: arms()[f"nft, {share}"] for share in SHARED_POINTS}
    return {TODAYS_POINT: today, **anchored, **fewer, **shared}


def points_at_rates(rates: Path) -> dict[str, Flags]:
    """The points at the rate found for TODAY; arms of `clips` keep theirs, so that their runs are shared."""
    searched_arms = {share: f"nft, {share}" for share in SHARED_POINTS}
    return {
        arm: {**flags, **chosen(searched_arms.get(arm, TODAY), rates)}
        for arm, flags in points().items()
    }


def two_best(
    results: Path, compared: Collection[str] | None = None, seeds: int = SEEDS
) -> list[str]:
    """The two arms with the highest mean match of those that never collapsed; empty until all runs are there.

    compared: the arms of the study, by default all.
    """
    by_arm: dict[str, list[Record]] = {arm: [] for arm in compared or compared_arms()}
    for run in records.read_all(results).values():
        if run["study"] == "clips":
            by_arm[run["arm"]].append(run)
    if any(len(arm_runs) < seeds for arm_runs in by_arm.values()):
        return []
    sound = {
        arm: interval([validated(run, MATCH) for run in arm_runs]).mean
        for arm, arm_runs in by_arm.items()
        if not any(run["collapsed"] for run in arm_runs)
    }
    return sorted(sound, key=lambda arm: -sound[arm])[:2]


def checked_points(results: Path, variety: Study) -> dict[str, Flags]:
    """The point that `variety` proposes, and today's; empty if it proposes none, or not yet."""
    plan = StudyPlan(recipe=RECIPE, studies={"variety": variety})
    found = arms_of(plan, "variety", variety, records.read_all(results))
    proposed = third_tables.proposed_point(found, TODAYS_POINT, variety.seeds)
    if proposed is None:
        return {}
    return {arm: variety.arms[arm] for arm in (TODAYS_POINT, proposed)}


def studies(results: Path = RESULTS, tiny: bool = False) -> dict[str, Study]:
    """All studies, in the order in which they are run; those that wait for results have no arms yet."""
    rates = rates_file(results)
    seeds = 1 if tiny else SEEDS
    few_seeds = 1 if tiny else FEW_SEEDS

    def rehearsable(study_arms: Mapping[str, Flags]) -> dict[str, Flags]:
        return {arm: flags for arm, flags in study_arms.items() if not tiny or arm in TINY_ARMS}

    def at_rates(study_arms: Mapping[str, Flags]) -> dict[str, Flags]:
        return {arm: {**flags, **chosen(arm, rates)} for arm, flags in study_arms.items()}

    searched_arms = rehearsable(arms())
    plain = rehearsable(compared_arms())
    best = two_best(results, plain, seeds)
    with_guidance = guided(best) if best else {}
    search = {"flags": REPORTED | RAW, **SEARCH}
    measured = {"flags": REPORTED | RAW, "measured": ("spread",)}
    compared = {"seeds": seeds, **measured}
    variety = Study(
        "What keeps the clips of a prompt different, and what does it cost in match?",
        rehearsable(points_at_rates(rates)), seeds=few_seeds, **measured,
    )  # fmt: skip
    made = {
        "rates": Study("At which learning rate is each arm at its best?", rated(searched_arms), **search),
        "further_rates": Study("And beyond the ends of that range?", further(searched_arms, rates), **search),
        "clips": Study(
            "How many clips of a group should be trained?", at_rates(plain), **compared,
        ),
        "averaged": Study(
            "Is it the same for averaged weights?",
            rehearsable(averaged_arms(rates)), against=averaged_pairs(), **compared,
        ),
        "centering": Study(
            "Should the advantages of the trained clips add up to 0?",
            at_rates(rehearsable(paired_arms())),
            seeds=few_seeds, against=centered_pairs(), **measured,
        ),
        "samplers": Study(
            "What does a cheaper sampler of rollouts cost in the trained model?",
            {arm: {**flags, **chosen(TODAY, rates)} for arm, flags in rehearsable(sampled()).items()},
            seeds=few_seeds, against=COMPARED_SAMPLERS, **measured,
        ),
        "variety": variety,
        "variety_check": Study(
            "Does the proposed point hold with new seeds?", checked_points(results, variety),
            seeds=few_seeds, first_seed=1 + few_seeds, **measured,
        ),
        "guidance_rates": Study(
            "At which learning rate is each guided arm at its best?", rated(with_guidance), **search
        ),
        "further_guidance_rates": Study(
            "And beyond the ends of that range?", further(with_guidance, rates), **search
        ),
        "guidance": Study(
            "Is it the same with guidance, for the two best?",
            at_rates(with_guidance), **compared,
        ),
    }  # fmt: skip
    if not tiny:
        return made
    return {name: rehearsed(study) for name, study in made.items()}


def beside_the_search(registered: Mapping[str, Study]) -> dict[str, Study]:
    """While few runs search beyond the ends, arms of `clips` with a known rate begin in the slots that are free."""
    clips = registered["clips"]
    known = {arm: flags for arm, flags in clips.arms.items() if "learning_rate" in flags}
    first = replace(clips, arms=known, seeds=min(clips.seeds, FIRST_SEEDS))
    return {**registered, "clips": first}


def rehearsed(study: Study) -> Study:
    """The study with runs of seconds."""
    shrunk = {arm: {**flags, **TINY} for arm, flags in study.arms.items()}
    return Study(study.question, shrunk, study.seeds, study.first_seed, study.flags, measured=())


def rates_file(results: Path) -> Path:
    """What the searches among these results found."""
    return results.with_name(f"{results.stem}_rates.json")


def page() -> str:
    """What is registered: every study with its arms, their length and their units."""
    registered = {"clips": arms(), "samplers": sampled(), "variety": points()}
    return "\n".join([REGISTERED, *map(arm_table, registered, registered.values())])


def arm_table(study: str, study_arms: Mapping[str, Flags]) -> str:
    """The arms of a study under a heading."""
    lines = [f"## Arms of `{study}`", ""]
    lines += ["| arm | flags | iterations | units per clip |", "|---|---|---|---|"]
    for arm, flags in study_arms.items():
        config = config_of(REPORTED, RAW, flags)
        told = [f"{k} {v}" for k, v in flags.items() if not found_by_search(study, k, v)]
        cost = compute.units(config)
        lines.append(f"| {arm} | {', '.join(told)} | {config.max_steps} | {cost:.1f} |")
    return "\n".join(lines) + "\n"


NUM_ARMS = len(ALGORITHMS) * len(SHARES)
NUM_COMPARED = NUM_ARMS - len(NOT_CENTERED)
NEW_SAMPLER_RUNS = FEW_SEEDS * (len(SAMPLERS) - 1)  # today's are among those of `clips`
NEW_POINT_RUNS = FEW_SEEDS * (len(ANCHORS) + len(FEWER_UPDATES))
ADDED_AFTER = 52  # runs of `clips`, when `averaged` was registered
GUIDED_RUNS = len(RATES) + SEEDS  # per arm
SEARCHED_RATES = ", ".join(f"{rate:g}" for rate in RATES)
REGISTERED = f"""# Registration of the third edition

`python -m research.studies.third_edition --page` writes this page. It was committed before the first run; later changes
are dated.

**Questions.** All clips of a group are sampled and scored. How many of them should be trained (`train_clips`: the best
and the worst), for nft, awm and GRPO with a window of one step (flash), at equal compute? What does a cheaper sampler
of nft's rollouts cost in the trained model? And what keeps the clips of a prompt different, at what cost in match?

**Runs** vary `configs/tiny_gpu.yaml` as the second edition does ({SETTINGS}),
with 16 prompts per forward and without averaged weights, which would lag by other shares of runs of other lengths. An
update has 128 clips: 16 prompts x 8, or 8 x 16 where a group has 16. A unit is one forward of one clip at full size;
every arm gets what {BUDGET} updates of the published method cost; only two points of `variety` get less. Each run is
validated at the start and at every eighth of its length, in 10 Euler steps, whatever sampler its rollouts take; guided
arms with guidance in all of these.

**Learning rates.** Each arm of `clips` is run at {SEARCHED_RATES} with seed {SEARCH["first_seed"]}, which no result
reports; the rate with the highest last reward is taken, and if that is at an end, the arm is also run at the rate
beyond, as in the second edition. `samplers` and `variety` search no further: they take the rate found for *{TODAY}*,
and the two points of `variety` that are arms of `clips` keep theirs.

**Studies**, in this order: `rates`, `further_rates` (the searches; beside the second begin runs of `clips` whose rate
is known); `clips` (all centered arms, seeds 1 to {SEEDS}), `averaged` (the same seeds), and in what their last runs
leave free `centering`, `samplers` and `variety` (seeds 1 to {FEW_SEEDS}, whose references share the runs of `clips`);
`variety_check` (the proposed point, seeds {FEW_SEEDS + 1} to {2 * FEW_SEEDS}); then `guidance_rates`,
`further_guidance_rates` and `guidance` (guidance 2, seeds 1 to {SEEDS}) for the two arms of `clips` with the highest
mean gold match of the last validation, among centered ones of which no run collapsed, and for *{REFERENCE}*.

**Measures**, per seed: gold match of the last validation; units until held-out prompts first have a match of
{GOAL_MATCH:g}, linearly between validations, where a run that never has it counts with all its units; reward; and the
spread of 16 prompts that leave size, speed and background open (research/studies/spread.py), among pairs of clips that
both match.

**Decisions about clips.** Arms are compared with *{REFERENCE}*, by pairs of seeds. Seeds in which it never reaches the
match leave the comparison of units.

- *Cheaper.* The ratio of units, by logarithms. The goal, {GOAL_RATIO:g}, is **met** if the upper end of its 95 %
  interval is at most that, and **met on average** if its mean is.
- *No worse.* The lower end of the 95 % interval of the difference in match, and of that in spread, is above
  -{MARGIN:g}: the same seed run twice on a GPU differs by as much.
- An arm **wins** if it meets the goal and is no worse in both. If none does, the numbers are the result, and the nft
  recipes use `train_clips 2` only if its arm is no worse in match and meets the goal on average.
- All other differences follow the rule of the second edition: 95 % interval and Holm's correction over the arms.

**Decision about centering.** The advantages of the best and the worst of a group do not add up to 0; `center_trained`
subtracts their mean. A centered arm is compared with the same arm that is not centered, by pairs of seeds. If for one
of them no centered run collapsed and the lower end of the 95 % interval of the difference in match is above 0,
`center_trained` stays the default. Otherwise it becomes a flag that no recipe uses.
Collapsed runs count with the match of the base model here (added on 2026-11-19, before any run of `centering`): without
a last validation they would leave the comparison, and take with them what centering prevents.

**Changed on 2026-11-19, after the first runs of the search and before any run that is compared.** Before, no arm was
centered but copies of guided ones, since nobody knew whether it matters. The search, with one seed, showed that it
does: not centered, awm that trains some of its clips collapses at every rate, and nft that trains the best and worst
falls behind training all clips. Now arms that train some of their clips are centered, and searched again; of those that
are not, the best and worst of 8 remain for the decision above, in a study of their own (`centering`) with
{FEW_SEEDS} seeds, because the search shows differences that 4 seeds can tell. The search of the others is in the
records, too.

**Averaged weights, added on 2026-11-19,** when {ADDED_AFTER} runs of `clips` were known. There the best and worst of 8
lead for a quarter of the compute, but then drift, and end behind. An average of the weights removes what differs from
update to update, and an early look with averaged weights saw no such drift. So `averaged` trains *{REFERENCE}*
with `ema_decay {DECAYS[REFERENCE]:g}` and *{CHEAPER}* with {DECAYS[CHEAPER]:g}, which lag by as
many units, at the rates found without, and validates what users of averaged weights get. The decisions about clips are
made for these two arms, too, with *{averaged_arm(REFERENCE)}* as the reference. The nft recipes average their
weights if, for the arm that they train, the lower end of the 95 % interval of averaged minus last weights in match is
above -{MARGIN:g}. If they do, the averaged arms decide about their `train_clips`, otherwise the others.
*Not followed, 2026-11-19, with all of these runs known:* the match is no lower, but the recipes keep the last weights.
The lag was known, but the rule gives it no weight; with no gain measured, it decided ([results](results_3.md)).
`train_clips` is decided alike either way.

**Decisions about samplers.** Samplers are compared with *{TODAYS_SAMPLER}*, guided ones with *{GUIDED_SAMPLER}*. They
and the points of `variety` start from *{TODAY}*, as the recipes do since {ADDED_AFTER} runs of `clips` are known;
before any of their runs, this was *{CHEAPER}*. A step less saves 4 % of a clip's units, and four
seeds cannot tell such a difference from chance, so means decide:

- A sampler that costs fewer units per clip may be taken if its match and its spread are not lower by {MARGIN:g} or more
  and it needs no more units to a match of {GOAL_MATCH:g}. One that costs as many or more may be taken only if the lower
  end of the 95 % interval of the difference in match is above 0. A sampler with a collapsed run is never taken.
- Of these the one with the fewest units per clip is **taken**, and of equally cheap ones that with the highest match.
  Recipes at full size take over its solver and, in proportion, its steps: today they have 10 for the 5 here. If none
  may be taken, they stay. Solvers that are not taken remain flags that no recipe uses.

Left out: 8 bits, whose speed a small model does not show, and guidance in other parts of the steps, which cost clips of
the base model a match of 0.24 and 0.32 (0.12 above a noise level of 0.8, which is the part that is tried).

**Decisions about variety.** In the second edition the spread of nft had a standard deviation of 0.03 over seeds, and
fell by 0.08 from the base model's: four seeds tell points apart by some 0.07, eight by 0.04. So four propose, and new
ones confirm. Compared with *{TODAYS_POINT}*, by pairs of seeds:

- A point may be **proposed** if no run collapsed, its mean match is not lower by {MARGIN:g} or more, and its mean
  spread is higher. Of these the one with the highest mean spread is.
- It is **taken** by the recipes if with the new seeds no run collapsed and its mean match is again not lower by
  {MARGIN:g} or more, and the lower end of the 95 % interval of the difference in spread over all {2 * FEW_SEEDS} seeds
  is above 0. Otherwise today's point stays.
- The figure shows match and spread of every point and of the base model, whatever is decided.

Left out: a bonus for spread, which would be another reward rather than another way to train, and a share of extremes
from the top only: it needs a flag of its own, and training on good samples alone is expected to narrow, as it does in
language models (arXiv 2504.11343).

A collapsed run has no last validation, and is counted. Runs that fail for a reason of the machine are repeated.

**Budget.** {NUM_ARMS} arms: {3 * NUM_ARMS} runs of the search and some beyond its ends,
{SEEDS * NUM_COMPARED} that are compared, {SEEDS * len(averaged_pairs())} with averaged weights,
{FEW_SEEDS * len(NOT_CENTERED)} that are not centered, {NEW_SAMPLER_RUNS} of other samplers,
{NEW_POINT_RUNS} of other points (8 of them shorter) and up to {FEW_SEEDS} that confirm one, and
{3 * GUIDED_RUNS} with guidance. In the second edition 106 runs of these units took 26 minutes with 18 processes on
an H200: by that, all of it takes a bit more than an hour.
"""


def more_tables(registered: Mapping[str, Study]) -> dict[str, Table]:
    """The tables that not every study has."""
    plan = StudyPlan(recipe=RECIPE, studies=registered)

    def arms_in(study: str, runs: Mapping[str, Record]) -> Arms:
        return arms_of(plan, study, registered[study], runs)

    def spread(_: Arms, runs: Mapping[str, Record], study: str) -> str:
        return compute.spread_table(arms_in(study, runs))

    def search(_: Arms, runs: Mapping[str, Record], study: str) -> str:
        return compute.search_table(runs, (study, f"further_{study}"))

    tables: dict[str, Table] = {
        "clips": partial(third_tables.goal_table, reference=REFERENCE),
        "centering": partial(third_tables.centering_table, pairs=centered_pairs(), seeds=FEW_SEEDS),
        "averaged": partial(
            third_tables.averaged_table,
            pairs=averaged_pairs(),
            reference=averaged_arm(REFERENCE),
            seeds=SEEDS,
        ),
        "guidance": partial(third_tables.goal_table, reference=guided_arm(REFERENCE)),
        "samplers": partial(third_tables.sampler_table, against=COMPARED_SAMPLERS, seeds=FEW_SEEDS),
        "variety": partial(
            third_tables.variety_table,
            reference=TODAYS_POINT,
            seeds=FEW_SEEDS,
            check_of=partial(arms_in, "variety_check"),
        ),
        "spread": partial(spread, study="clips"),
        "guided_spread": partial(spread, study="guidance"),
    }
    for name in SEARCHES:
        tables[f"searched_{name}"] = partial(search, study=name)
    return tables


def summary(results: Path, target: Path) -> int:
    """Write tables and figures of the results."""
    registered = studies(results)
    figures = {}
    for name in ("clips", "averaged", "samplers", "guidance"):
        colors = dict(zip(registered[name].arms, PALETTE, strict=False))
        plot = partial(compute.draw_compute, colors=colors)
        figures[name] = StudyFigure(plot, (1, 3), colors=colors)
    trade_off = partial(third_tables.draw_trade_off, reference=TODAYS_POINT, curves=CURVES)
    colors = third_tables.point_colors(CURVES, TODAYS_POINT)
    figures["variety"] = StudyFigure(trade_off, (1, 2), colors=colors, panel_height=4.0)
    arguments = ["--recipe", str(RECIPE), "--results", str(results), "--page", str(target)]
    return results_page.main(arguments, registered, figures, more_tables(registered))


def run_stages(options: Any, passed_on: Sequence[str]) -> int:
    """Run the stages one after another, until all is done or the budget ends.

    A run that fails stops a search, which must be complete, but no comparison: what depends on it has no arms then.
    """
    deadline = time.monotonic() + 60 * options.budget_minutes
    outcome = DONE
    for stage in STAGES:
        registered = studies(options.results, options.tiny)
        if "further_rates" in stage:
            registered = beside_the_search(registered)
        names = [name for name in stage if registered[name].arms]
        if not names:
            continue
        minutes = (deadline - time.monotonic()) / 60
        words = ["--studies", *names, "--budget_minutes", str(minutes), *passed_on]
        print(f"{', '.join(names)}:", flush=True)
        code = ablate.main(words, registered)
        write_json(rates_file(options.results), choose(options.results, SEARCHES))
        if code == FAILED and searches_are_complete(options, names, registered):
            outcome = FAILED
        elif code != DONE:
            return code
    return outcome


def searches_are_complete(
    options: Any, names: Sequence[str], registered: Mapping[str, Study]
) -> bool:
    """Whether all runs of those of these studies that search for rates have a result."""
    searches = [name for name in names if name.endswith("rates")]
    if not searches:
        return True
    done = records.read_all(options.results)
    plan = StudyPlan(searches, options.seeds, options.recipe, registered)
    return plan.runs.keys() <= done.keys()


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
