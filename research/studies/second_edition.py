"""The second edition of the studies: the paper's regime, and which method gives the most per unit of compute.

    python -m research.studies.second_edition --page             writes research/studies/registration.md
    python -m research.studies.second_edition --list             lists studies, runs, core-minutes
    python -m research.studies.second_edition --studies rates --jobs 16 --budget_minutes 9
    python -m research.studies.second_edition --choose           takes rates and KL weights from the searches
    python -m research.studies.second_edition --studies further_rates --jobs 16 --budget_minutes 9
    python -m research.studies.second_edition --choose
    python -m research.studies.second_edition --studies head_to_head --jobs 16 --budget_minutes 9
    python -m research.studies.second_edition --summary          writes tables and figures: research/studies/results.md

All other flags are those of research.studies.ablate. What is asked, measured and decided is registered before the runs:
research/studies/registration.md is committed, and a test compares it with this file. Runs vary configs/tiny_gpu.yaml.

A unit is one forward of one clip at full size. Every arm of a comparison gets the same number of units, so cheap
rollouts get more updates. Learning rates and KL weights are searched with seeds that no result reports.
"""

import json
import math
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from research.studies import ablate, compute, kl_strategies, records
from research.studies import page as results_page
from research.studies.compute import DECODED, REWARDED, TRAINED, units
from research.studies.page import StudyFigure
from research.studies.questions import (
    HERE,
    OFF,
    PUBLISHED,
    RECORDS,
    ROOT,
    SETTING_A,
    Flags,
    Study,
    StudyPlan,
)
from research.studies.records import Record
from research.studies.result_tables import Arms, Table, arms_of
from sage_grpo.config.fields import Config
from sage_grpo.config.parse import from_values
from sage_grpo.config.yaml_files import yaml_mapping
from sage_grpo.exit_codes import WRONG_INPUT
from sage_grpo.files.json_files import write_json
from sage_grpo.runs.history import as_float
from sage_grpo.tools.figure_style import PALETTE
from sage_grpo.tools.plan.planner import plan_of
from sage_grpo.train.algorithms.registry import build_algorithm

RECIPE = ROOT / "configs" / "tiny_gpu.yaml"
RESULTS = RECORDS / "second.jsonl"
PAGE = HERE / "registration.md"
CHOSEN = HERE / "rates.json"
WEIGHTS = HERE / "kl_weights.json"
SUMMARY = HERE / "results.md"
RATES = (1e-4, 3e-4, 1e-3)
FURTHER = {RATES[0]: 3e-5, RATES[-1]: 3e-3}  # tried where the best of these is at an end
SEARCH = {"seeds": 1, "first_seed": 101}
SEEDS = 8
BUDGET = 40  # updates of the published method, whose units every arm of the head-to-head may use
SHARED: dict[str, Any] = {
    "num_sampling_steps": 10, "validation_num_inference_steps": 10, "sde_window": "all_but_last", "num_generations": 8,
    "batch_size": 128, "prompts_per_forward": 8, "validation_videos": 0, "report_to": "none",
}  # fmt: skip
# fewer, larger kernels; the searches were made before
REPORTED = SHARED | {"prompts_per_forward": 16}
RAW = {"ema_decay": 0.0}
# rollouts of 5 steps of second order, 3 trained noise levels
RIVAL = {"tail_steps": 5, "timestep_fraction": 0.3}
NFT = {"algorithm": "nft"} | RIVAL
FIFTH = {"kl_weight": 0.06}
# max_steps by a count that left the anchor out of one iteration in ten, where nft runs it in all
SLOW = {
    "nft_decay": 0.95,
    "nft_decay_growth": 1.0,
    "max_steps": 92,
    "validation_interval": 23,
    "log_interval": 12,
}
CHEAP = {"same_init_noise": True, "tail_steps": 3}
# for each other sampler, the eta at which its noise has the same sum of std^2 as sage at eta 0.7
EQUAL_ENERGY = {"flow_grpo": 0.7498, "dance_grpo": 1.7656, "cps": 0.4927, "precise": 0.9226}
METHODS: dict[str, Flags] = {
    "published": PUBLISHED,
    "sage, all but the last step": {},
    "MixGRPO, sliding window of 4": {"sde_window": "slide_iteration:4"},
    "2 steps per prompt": {"sde_window": "random:2"},
    "1 step per prompt": {"sde_window": "random:1"},
    "flash, 2 steps per prompt": {"sde_window": "random:2"} | CHEAP,
    "flash, 1 step per prompt": {"sde_window": "random:1"} | CHEAP,
    **{
        name.partition("_")[0]: {"sde_type": name, "eta": eta} for name, eta in EQUAL_ENERGY.items()
    },
    "awm": {"algorithm": "awm"} | RIVAL,
    "nft": NFT,
    "nft, a fifth of the KL": NFT | FIFTH,
    "nft, slow old policy": NFT | SLOW,
    "nft, slow old policy, a fifth of the KL": NFT | SLOW | FIFTH,
}
CHECKED = (
    "published",
    compute.ALL_STEPS,
    "MixGRPO, sliding window of 4",
    "flash, 1 step per prompt",
    "cps",
    "awm",
)
# What the authors of awm and nft set otherwise and flags of ours can set, too (docs/method.md)
BATCH_STD = {"advantage_std": "batch"}
UNIT_KL = {"kl_weight": 1.0}  # to the moving anchor; the authors' is to an average of the policy
GUIDED = {"guidance_scale": 2.0, "cuda_graphs": False}  # CUDA graphs support one branch only
PROMPTS = (1, 2, 4, 8, 16, 32)
CLIPS = 5120  # of every arm of the study of batches


def config_of(*flags: Flags) -> Config:
    """The recipe with the flags that all studies share, and these."""
    recipe = yaml_mapping(RECIPE.read_text(encoding="utf-8"), str(RECIPE))
    return from_values(recipe, SHARED, *flags)


def energy(config: Config) -> float:
    """Noise that a rollout adds: the sum of std^2 over its exploring steps."""
    model = str(ROOT / config.pretrained_model_root)
    plan = plan_of(replace(config, pretrained_model_root=model), 1)
    schedule = build_algorithm(plan.config).schedule()
    return float(schedule.window(plan.windows.steps).std.square().sum())


def lasting(steps: int) -> dict[str, int]:
    """Flags for a run of this length: 8 points a curve, validated at the start, three times between and at the end."""
    return {
        "max_steps": steps,
        "validation_interval": math.ceil(steps / 4),
        "log_interval": math.ceil(steps / 8),
    }


def affordable(flags: Flags, budget: float) -> dict[str, Any]:
    """The flags of an arm, with as many iterations as the budget pays for, in units."""
    config = config_of(flags)
    iterations = round(budget / (units(config) * config.batch_size))
    return {**lasting(max(1, iterations)), **flags}


def rated(arms: Mapping[str, Flags]) -> dict[str, Flags]:
    """Each arm at each rate of the search."""
    return {
        f"{arm}, {rate:g}": {**flags, "learning_rate": rate}
        for arm, flags in arms.items()
        for rate in RATES
    }


def further(arms: Mapping[str, Flags], rates: Path | None = None) -> dict[str, Flags]:
    """The arms whose best rate so far is at an end of the range, at the rate beyond it; `rates` as for `searched`."""
    rewards = searched(rates)
    extended = {}
    for arm in (arm for arm in arms if arm in rewards):
        rate = FURTHER.get(best_first_rate(rewards[arm]))
        if rate:
            extended[f"{arm}, {rate:g}"] = {**arms[arm], "learning_rate": rate}
    return extended


def searched(rates: Path | None = None) -> dict[str, dict[float, float]]:
    """The last reward at each learning rate, NaN if the run collapsed; of the arms for which all RATES were tried.

    rates: the file that `choose` filled, by default this edition's.
    """
    file = rates or CHOSEN
    stored = json.loads(file.read_text()) if file.is_file() else {}
    rewards = {
        arm: {float(rate): as_float(reward) for rate, reward in by_rate.items()}
        for arm, by_rate in stored.items()
    }
    return {arm: by_rate for arm, by_rate in rewards.items() if set(RATES) <= set(by_rate)}


def best_of(rewards: Mapping[float, float]) -> float:
    """The rate with the highest reward; collapsed runs last."""
    return max(rewards, key=lambda rate: -math.inf if math.isnan(rewards[rate]) else rewards[rate])


def best_first_rate(rewards: Mapping[float, float]) -> float:
    """The best of the rates that are tried for every arm."""
    return best_of({rate: rewards[rate] for rate in RATES})


def chosen(arm: str, rates: Path | None = None) -> dict[str, float]:
    """The learning rate of an arm as a flag, empty until its search is complete; `rates` as for `searched`."""
    rewards = searched(rates).get(arm)
    if not rewards:
        return {}
    beyond = FURTHER.get(best_first_rate(rewards))
    if beyond and beyond not in rewards:
        return {}
    return {"learning_rate": best_of(rewards)}


def checked(arms: Mapping[str, Flags]) -> dict[str, Flags]:
    """The arms with a validation for each point of a curve, and the published settings at a higher rate besides."""
    often = {
        arm: {**flags, "validation_interval": math.ceil(flags["max_steps"] / 8)}
        for arm, flags in arms.items()
    }
    return often | {"published, 0.0003": {**often["published"], "learning_rate": 3e-4}}


def kl_weights() -> dict[str, float]:
    """The weight of each KL strategy; empty until the search is complete."""
    return json.loads(WEIGHTS.read_text())["weights"] if WEIGHTS.is_file() else {}


def batches() -> dict[str, Flags]:
    """Arms that differ in their prompts per update, of 8 clips each, and have equally many clips in all."""
    arms = {}
    for count in PROMPTS:
        name = "1 prompt per update" if count == 1 else f"{count} prompts per update"
        batch_size = 8 * count
        arms[name] = {"batch_size": batch_size} | lasting(CLIPS // batch_size)
    return arms


def guided(budget: float) -> dict[str, Flags]:
    """What the recipes do and both rivals, sampled with guidance; the same units pay for fewer updates."""
    names = {"flash": "flash, 1 step per prompt", "awm": "awm", "nft": "nft"}
    return {
        f"{name}, guided": affordable({**METHODS[arm], **GUIDED}, budget)
        for name, arm in names.items()
    }


def as_by_authors(equal: Mapping[str, Flags]) -> dict[str, Flags]:
    """awm and nft as they are here, and with what their authors set otherwise, at the rates of the head-to-head."""
    nft = {**equal["nft"], **chosen("nft")}
    awm = {**equal["awm"], **chosen("awm")}
    return {
        "nft": nft,
        "nft, batch std": nft | BATCH_STD,
        "awm": awm,
        "awm, batch std": awm | BATCH_STD,
        "awm, batch std, KL weight 1": awm | BATCH_STD | UNIT_KL,
    }


def shared_windows(equal: Mapping[str, Flags]) -> dict[str, Flags]:
    """Flash with a window for each prompt, and with one for all prompts of an iteration."""
    arm = "flash, 2 steps per prompt"
    for_each = {**equal[arm], **chosen(arm)}
    return {
        arm: for_each,
        "flash, 2 steps per iteration": for_each | {"sde_window": "random_iteration:2"},
    }


def studies() -> dict[str, Study]:
    """All studies, in the order in which they are run."""
    published = config_of(PUBLISHED)
    budget = BUDGET * units(published) * published.batch_size
    equal = {arm: affordable(flags, budget) for arm, flags in METHODS.items()}
    with_guidance = guided(budget)
    without = {f"{arm}, unguided": {**equal[arm], **chosen(arm)} for arm in ("awm", "nft")}
    claim = {"flags": REPORTED | lasting(60), "seeds": SEEDS}
    return {
        "rates": Study("At which learning rate is each method at its best?", rated(equal), flags=SHARED, **SEARCH),
        "further_rates": Study("And beyond the ends of that range?", further(equal), flags=SHARED, **SEARCH),
        "head_to_head": Study(
            "Which method gives the most per unit of compute?",
            {arm: {**flags, **chosen(arm)} for arm, flags in equal.items()}, flags=REPORTED, seeds=SEEDS,
        ),
        "raw_weights": Study(
            "Is it the same without averaged weights, and how far do clips of a prompt still spread?",
            checked({arm: {**equal[arm], **chosen(arm)} for arm in CHECKED}),
            flags=REPORTED | RAW, seeds=4, first_seed=11, measured=("spread",),
        ),
        "batch_rates": Study(
            "At which learning rate is each batch at its best?", rated(batches()), flags=SHARED | RAW, **SEARCH
        ),
        "further_batch_rates": Study(
            "And beyond the ends of that range?", further(batches()), flags=SHARED | RAW, **SEARCH
        ),
        "batches": Study(
            "How many prompts per update, at equal clips?",
            {arm: {**flags, **chosen(arm)} for arm, flags in batches().items()},
            flags=REPORTED | RAW, seeds=SEEDS,
        ),
        "guidance_rates": Study(
            "At which learning rate is each guided method at its best?", rated(with_guidance), flags=SHARED | RAW,
            **SEARCH,
        ),
        "further_guidance_rates": Study(
            "And beyond the ends of that range?", further(with_guidance), flags=SHARED | RAW, **SEARCH
        ),
        "guidance": Study(
            "With guidance, as large models are sampled, which method gives the most?",
            {arm: {**flags, **chosen(arm)} for arm, flags in with_guidance.items()} | without,
            flags=REPORTED | RAW, seeds=SEEDS, measured=("spread",),
        ),
        "authors": Study(
            "Does it matter what the authors of awm and nft set otherwise?",
            as_by_authors(equal), flags=REPORTED | RAW, seeds=4, first_seed=21,
            against={
                "nft, batch std": "nft", "awm, batch std": "awm", "awm, batch std, KL weight 1": "awm",
            },
        ),
        "shared_window": Study(
            "Two exploring steps for each prompt, or for all prompts of an iteration, which spares ranks from waiting?",
            shared_windows(equal), flags=REPORTED | RAW, seeds=4, first_seed=21,
        ),
        "equalizer": Study("What does the gradient equalizer change (Figure 3)?", {"on": {}, "off": OFF}, **claim),
        "settings": Study("Setting A or B (Table 2)?", {"B": {}, "A": SETTING_A}, **claim),
        kl_strategies.SEARCH: Study(
            "At which weight does a KL strategy halve the KL to the base model that training without a KL reaches?",
            kl_strategies.searched(), flags=SHARED | kl_strategies.FLAGS, measured=("path_kl",), **SEARCH,
        ),
        kl_strategies.COMPARED: Study(
            "Which KL strategy, at equal KL to the base model (Figure 8)?",
            kl_strategies.compared(kl_weights()), flags=REPORTED | kl_strategies.FLAGS, seeds=SEEDS,
            measured=("path_kl",),
        ),
    }  # fmt: skip


def page() -> str:
    """What is registered: every study with its arms, their length and their units."""
    lines = [REGISTERED]
    for name, study in studies().items():
        lines += [f"## {name}", "", study.question, ""]
        if name.endswith("rates"):
            arms = "where the best rate is at an end, at the one beyond"
            if name in SEARCHES:
                arms = "each at every rate"
            lines += [f"Arms: those of the study below, {arms}, seed {study.first_seed}.", ""]
            continue
        last = study.first_seed + study.seeds - 1
        seeds = f"Seeds {study.first_seed} to {last}." if study.seeds > 1 else f"Seed {last}."
        lines += [seeds, "", "| arm | flags | iterations | units |", "|---|---|---|---|"]
        for arm, flags in study.arms.items():
            config = config_of(study.flags, flags)
            thousands = units(config) * config.batch_size * config.max_steps / 1e3
            registered = [
                f"{flag} {value}"
                for flag, value in flags.items()
                if not found_by_search(name, flag, value)
            ]
            text = ", ".join(registered) or "the recipe"
            lines.append(f"| {arm} | {text} | {config.max_steps} | {thousands:.0f},000 |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def found_by_search(study: str, flag: str, value: object) -> bool:
    """Whether the page leaves a flag out: it is told elsewhere, or a search finds it after the page is written."""
    searched_weight = study == kl_strategies.COMPARED and flag == "kl_weight" and value != 0
    return flag in LEFT_OUT or searched_weight


SEARCHES = ("rates", "batch_rates", "guidance_rates")
LEFT_OUT = ("max_steps", "validation_interval", "log_interval", "learning_rate")
SETTINGS = ", ".join(f"`{name} {value}`" for name, value in SHARED.items())
REGISTERED = f"""# Registration of the second edition

`python -m research.studies.second_edition --page` writes this page, which is committed before the first run.

**Runs** vary `configs/tiny_gpu.yaml` with {SETTINGS}.
Unless an arm says otherwise, an update has 16 prompts x 8 clips. Runs that are reported join 16 prompts per forward,
which changes no more than rounding. The reward is the one that learned from pairs; held-out prompts are sampled by the
ODE.

**Measures**, per seed, of the last validation less the first: total reward (what is trained), gold match (what is
wanted), distance to the manifold. Besides, the variety of the clips of a prompt at the end of training over that at its
start (`signal/variety`).

**Units.** A forward of one clip is 1, a forward and backward {TRAINED}, a decode {DECODED}, a reward {REWARDED}, as
measured at full size. Every arm of the head-to-head gets what {BUDGET} updates of the published method cost.

**Learning rates.** Each arm is run at {", ".join(f"{rate:g}" for rate in RATES)} with seed {SEARCH["first_seed"]},
which no result reports. The rate with the highest last reward is taken, collapsed runs last. If that is the first or
the last of these, the arm is also run at the rate beyond, {" or ".join(f"{rate:g}" for rate in FURTHER.values())}.
The paper's claims use the recipe's rate for all arms.

**Added after the first 39 runs of `rates`**, before any run that is reported: the rates beyond, because the best was at
an end for six arms; and nft with a fifth of the KL. At the old policy, nft's gradient is that of awm times
sigma / (5 mean |v - target|), so that the same KL weighs about five times as much beside it.

**Added after the first 112 runs of `head_to_head`**, before any run of the new arms: nft with the old policy of its
paper, whose decay grows by 0.001 an update up to 0.5. The arms that were called nft until then sampled with the average
by which all arms are validated, of decay 0.95. Then the old policy lags by some 20 updates, and the reward was the same
at all learning rates of the search, as if the lag set the pace. They are reported as *slow old policy*.

**Decisions.** Arms are compared with the first of their study, by pairs of seeds. A difference is one if the 95 %
interval of its mean over the 8 pairs excludes 0 and its p-value, corrected by Holm over the arms of the study, is below
0.05; all else is undecided. A collapsed run (research/studies/records.py) has no last validation, and is counted. A
method wins the head-to-head if it beats the published one in gold match, and none that also does has a higher match by
the same rule. If a rival (awm, nft) wins, it is named the winner, and the recipes say when to take it.

**Raw weights**, registered together with nft's new arms. Validations sample weights that are averaged with a decay of
0.95, which lag by some 20 updates: half of the published method's 40, a ninth of the 185 of flash with one step. That
favors methods with many updates, and the head-to-head has no validation before a quarter of the units. So six methods,
and the published one at a learning rate of 0.0003, where one seed had more match and less reward, are run again with
four new seeds, without averaging and with a validation at each eighth. A finding of the head-to-head is confirmed if
the difference has the same sign and is decided by the same rule. The study of batches, of which nothing had been run,
does not average either: its largest batch has 20 updates.

**Guidance**, registered after most of the studies above had been run. Large models are sampled with guidance. awm and
nft train the model's own velocity all the same, and their authors sample without guidance, in training and afterwards.
So flash with one step, awm and nft are run at guidance {GUIDED["guidance_scale"]:g}, at which the base model has a
match of 0.73 (0.34 without), and awm and nft without guidance, at the rates of the head-to-head. The units are those of
the head-to-head; a guided forward counts as two. No averaging; each arm is validated as it samples. Compared are the
last validations themselves, because arms with and without guidance do not start alike. By the rate of the runs before,
this takes 10 minutes, and what is left of the other studies 9.

**Diversity.** A reward says nothing about what no prompt names. So at the end of the runs with raw weights or guidance,
16 prompts that leave size, speed and background open are sampled 8 times each from the base model and from the last
weights, with the same noise, and the oracle reads the clips (research/studies/spread.py). Measures: the share of pairs
of clips of a prompt that differ in an open attribute, and the standard deviation of where the object starts; both also
over the pairs in which both clips match their prompt. A method narrows a spread if the 95 % interval of its difference
from the base model over the seeds is below 0, and its p-value, corrected by Holm over the methods, is below 0.05.

**Authors' settings and shared windows**, registered after all of the above had been run: five arms of awm and nft, and
two of flash, with four new seeds each, raw weights, at the rates of the head-to-head. Compared are the last validations
in gold match and reward, by the rule of the decisions. (These 28 runs took 6 minutes.)

**Units to a reward.** The level is the reward of the base model and {compute.SHARE:.0%} of what *{compute.ALL_STEPS}*
gained at its best rate in the search. For each run of the head-to-head, the units until held-out prompts have it,
linearly between validations, over those of that arm with the same seed. Runs that never reach it count with all their
units; seeds in which that arm never does leave the pairs. An arm is cheaper or costlier by the rule above, on
logarithms. The target is a third.

**Budget.** The 39 runs of `rates` took 12 minutes on an H200 that four other runs shared; 17 processes fill it. By
that, `head_to_head` takes 24 minutes, `batch_rates` and `batches` 15, `equalizer` and `settings` 7, `kl_strategies` 5;
perhaps a fifth less, since validations now join prompts. (The 112 runs took 23 minutes; by that, nft's new arms take 5
and `raw_weights` 7.) Runs are kept one by one. Matrix products are in TF32
(`TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1`), in rollout and training alike.

{kl_strategies.REGISTERED}"""


def choose(results: Path, searches: Sequence[str] = SEARCHES) -> dict[str, dict[str, float | None]]:
    """The last reward of each arm at each rate that was tried; None if the run collapsed."""
    rewards: dict[str, dict[str, float | None]] = {}
    runs = records.read_all(results).values()
    for study in (*searches, *(f"further_{name}" for name in searches)):
        for record in (record for record in runs if record["study"] == study):
            arm = record["arm"].rpartition(", ")[0]
            rate = f"{record['config']['learning_rate']:g}"
            last_reward = record["validation"]["reward/total"][-1]
            rewards.setdefault(arm, {})[rate] = None if record["collapsed"] else last_reward
    return rewards


def summary(results: Path, page: Path) -> int:
    """Write tables and figures of the results."""
    arguments = ["--recipe", str(RECIPE), "--results", str(results), "--page", str(page)]
    registered = studies()
    colors = dict(zip(registered["guidance"].arms, PALETTE, strict=False))
    draw_guidance = partial(compute.draw_compute, colors=colors)
    figures = {
        "head_to_head": StudyFigure(compute.draw_compute, (1, 3), colors=compute.COLORS),
        "batches": StudyFigure(compute.draw_batches, (1, 3)),
        "guidance": StudyFigure(draw_guidance, (1, 3), colors=colors),
    }
    return results_page.main(arguments, registered, figures, more_tables())


def more_tables() -> dict[str, Table]:
    """Tables of the page besides those that every study has."""
    registered = studies()
    plan = StudyPlan(recipe=RECIPE, studies=registered)

    def arms_in(study: str, runs: Mapping[str, Record]) -> Arms:
        return arms_of(plan, study, registered[study], runs)

    def decision(_: Arms, runs: Mapping[str, Record], study: str) -> str:
        return compute.decision_table(arms_in(study, runs), runs)

    def spread(_: Arms, runs: Mapping[str, Record], study: str) -> str:
        return compute.spread_table(arms_in(study, runs))

    def samplers(_: Arms, runs: Mapping[str, Record]) -> str:
        arms = arms_in("head_to_head", runs)
        names = (compute.ALL_STEPS, *(name.partition("_")[0] for name in EQUAL_ENERGY))
        return compute.sampler_table({name: arms[name] for name in names})

    def search(_: Arms, runs: Mapping[str, Record], study: str) -> str:
        return compute.search_table(runs, (study, f"further_{study}"))

    made: dict[str, Table] = {
        "head_to_head": compute.cost_table,
        "raw_weights": compute.cost_table,
        "decision": partial(decision, study="head_to_head"),
        "raw_decision": partial(decision, study="raw_weights"),
        "samplers": samplers,
        "spread": partial(spread, study="raw_weights"),
        "guided_spread": partial(spread, study="guidance"),
    }
    for name in SEARCHES:
        made[f"searched_{name}"] = partial(search, study=name)
    return made


def unready(names: Collection[str]) -> str:
    """Which search one of these studies waits for, in one sentence; empty if they can run."""
    without_weight = kl_strategies.missing(kl_weights())
    if kl_strategies.COMPARED in names and without_weight:
        remedy = f"run --studies {kl_strategies.SEARCH} to its end, then --choose"
        return f"{kl_strategies.COMPARED} has no weight for {without_weight[0]}: {remedy}"

    searches = {  # study -> its arms, and the search that finds their rates
        "head_to_head": (METHODS, "rates"),
        "raw_weights": (CHECKED, "rates"),
        "batches": (batches(), "batch_rates"),
        "guidance": (guided(1.0), "guidance_rates"),
    }
    for study in (study for study in searches if study in names):
        arms, search = searches[study]
        without_rate = [arm for arm in arms if not chosen(arm)]
        if without_rate:
            arm = without_rate[0]
            missing = f"further_{search}" if arm in searched() else search
            remedy = f"run --studies {missing} to its end, then --choose"
            return f"{study} has no learning rate for {arm}: {remedy}"
    return ""


def main(arguments: Sequence[str]) -> int:
    parser = ablate.new_parser(__doc__)
    add = parser.add_argument
    add("--page", action="store_true", help="write research/studies/registration.md")
    add(
        "--choose", action="store_true", help="take learning rates and KL weights from the searches"
    )
    add("--summary", action="store_true",
        help="write tables and figures: research/studies/results.md")  # fmt: skip
    options = parser.parse_args(arguments)
    if options.page:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    if options.choose:
        write_json(CHOSEN, choose(RESULTS))
        write_json(WEIGHTS, kl_strategies.choose(RESULTS))
        return 0
    if options.summary:
        return summary(RESULTS, SUMMARY)
    problem = "" if options.list else unready(options.studies or studies())
    if problem:
        print(f"second_edition.py: {problem}", file=sys.stderr)
        return WRONG_INPUT
    defaults = {"--recipe": RECIPE, "--results": RESULTS, "--work": ROOT / "outputs" / "second"}
    places: list[str] = []
    for flag, value in defaults.items():
        if flag not in arguments:
            places += [flag, str(value)]
    return ablate.main([*arguments, *places], studies())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
