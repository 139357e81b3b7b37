"""The page of one run, from its head to the time per iteration; and where a page is written."""

import math
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sage_grpo.config.fields import ConfigError
from sage_grpo.escape import terminal_text
from sage_grpo.files.foreign import check_regular, replace_text
from sage_grpo.files.json_files import printable
from sage_grpo.intervals import MIN_PAIRS
from sage_grpo.runs.clips import Clip, pair_clips, read_validations
from sage_grpo.runs.diagnosis import Finding, diagnose
from sage_grpo.runs.gallery import read_gallery
from sage_grpo.runs.hacking import divergence
from sage_grpo.runs.history import (
    RunHistory,
    about,
    as_float,
    column,
    read_run,
    text_of,
)
from sage_grpo.runs.preferences import read_preferences
from sage_grpo.tools.paired import (
    TOTAL,
    aligned,
    clip_rows,
    compared,
    number,
    tables,
    validation_clips,
)
from sage_grpo.tools.report import figures
from sage_grpo.tools.report.comparison import comparison
from sage_grpo.tools.report.drawing import Panel
from sage_grpo.tools.report.settings import DEFAULTS, config_of, differing, has_meaning
from sage_grpo.tools.templating import render

MAX_ROLLOUTS = 8  # iterations whose best and worst clip a page shows

# what a report reads of a run folder
READ = (
    "command.txt",
    "config.yaml",
    "metrics.jsonl",
    "preferences.json",
    "status.json",
    "validation",
    "rollouts",
)


def write_report(*folders: Path, output: Path | None = None) -> Path:
    """Write the page of a run, by default into its folder, or one that compares several; returns its path."""
    # a page is shown to others: a link in a run folder from elsewhere could put any file of this machine into it
    for folder in folders:
        check_regular(folder, READ)
    several = len(folders) > 1
    with about(*folders):
        runs = [read_run(folder) for folder in folders]
        text = comparison(runs) if several else page(runs[0])
    if output is None:
        output = Path("comparison.html") if several else folders[0] / "report.html"
    replace_text(output, text)
    return output


def print_summary(folder: Path) -> None:
    """Print a table of a run's results and write the page; nothing that goes wrong here makes the run fail."""
    try:
        run = read_run(folder)
        for sentence in run.break_sentences:
            print(terminal_text(sentence))
        clips = before_after(run)
        if clips:
            shown = [aligned(table.rows) for table in tables(compared(clips, total=True))]
            print(terminal_text("\n\n".join(shown)))  # names of scores are those of a reward
        write_report(folder)
    except Exception as error:  # a damaged folder must not fail a run that is done
        print(
            f"the run is done, but its report could not be written: {printable(error)};"
            f" `python -m sage_grpo.tools.report {folder}` makes it",
            file=sys.stderr,
        )


@dataclass(frozen=True)
class Section:
    """Figures under a heading; nothing without figures."""

    title: str
    panels: list[Panel]
    intro: str = ""
    layout: str = "panels"  # or "maps", which are wider


def page(run: RunHistory) -> str:
    clips = before_after(run)
    result = compared(clips, total=True) if clips else None
    return render(
        "report.html",
        title=run.folder.resolve().name,
        findings=findings(run),
        tiles=tiles(run),
        command=text_of(run.folder / "command.txt").strip(),
        facts=facts(run),
        breaks=run.break_sentences,
        changed_settings=changed_settings(run),
        config=text_of(run.folder / "config.yaml").strip(),
        tables=tables(result, perfect_scores(run)) if result else [],
        measures=[reward_section(run), holdout_section(run), gold_section(run, result)],
        rows=clip_rows(clips, total=True),
        preferences=preference_rows(run),
        rollouts=spread(read_gallery(run.folder, run.iterations)),
        training=[
            update_section(run),
            denoising_step_section(run),
            schedule_section(run),
            time_section(run),
        ],
    )


# head


def findings(run: RunHistory) -> list[Finding]:
    with suppress(ConfigError):  # of an edited configuration, which the page shows anyway
        return diagnose(run)
    return []


class Tile(NamedTuple):
    value: str
    name: str


def tiles(run: RunHistory) -> list[Tile]:
    """Everything measured; before and after are the first and the last validation."""
    first_and_last = run.validations[:1] + run.validations[1:][-1:]
    shown = [Tile(str(run.iterations), "iterations")]

    metrics = {
        "total reward": "reward/total",
        "gold match": "gold/match",
        "distance to the manifold": "gold/distance",
    }
    for name, metric in metrics.items():
        if first_and_last and run.measured(metric):
            values = [number(value) for value in column(first_and_last, metric)]
            shown.append(Tile(" → ".join(values), name))

    perfect = as_float((run.head.get("perfect") or {}).get("total"), "perfect")
    totals = column(first_and_last, "reward/total")
    is_gap = bool(run.head.get("perfect_is_best")) and len(totals) == 2 and perfect > totals[0]
    if is_gap and math.isfinite(totals[1]):
        closed = (totals[1] - totals[0]) / (perfect - totals[0])
        shown.append(Tile(f"{100 * closed:.0f} %", "of the gap to perfect clips"))

    if run.has("time/total"):
        shown.append(Tile(f"{training_minutes(run):.3g} min", "in iterations"))
    if run.has("memory/peak_gb"):
        peak = np.nanmax(column(run.all_full_lines, "memory/peak_gb"))
        shown.append(Tile(f"{peak:.3g} GB", "peak memory"))
    return shown


def training_minutes(run: RunHistory) -> float:
    """Minutes of training, extrapolated from logged iterations; the others compute no gold metrics."""
    lines = run.all_full_lines
    total = np.nansum(column(lines, "time/total"))
    gold = np.nansum(column(lines, "time/gold"))
    seconds = run.iterations / len(lines) * (total - gold) + gold
    return float(seconds / 60)


def facts(run: RunHistory) -> list[str]:
    """Machine, size and versions, as far as the run recorded them."""
    head = run.head
    shown = []
    if head.get("device"):
        shown.append(head["device"])
    if head.get("world"):
        shown.append(f"world {head['world']}")
    if (head.get("ranks") or 1) > 1:
        shown.append(f"{head['ranks']} ranks")
    if head.get("trainable_parameters") is not None:
        shown.append(f"{head['trainable_parameters']:,} trainable parameters")
    for name, version in (head.get("versions") or {}).items():
        shown.append(f"{name} {version}")
    if run.starts and "time" in run.starts[0]:
        shown.append(f"started {run.starts[0]['time']}")
    if len(run.starts) > 1:
        shown.append(f"resumed {len(run.starts) - 1} ×")
    return shown


def changed_settings(run: RunHistory) -> list[str]:
    """The settings that are not the defaults and had a meaning in the run."""
    config = config_of(run)
    if not config:
        return []
    rows = differing({"run": config, "default": DEFAULTS})
    return [
        f"{name}: {value}" for name, value, _ in rows if value != "–" and has_meaning(name, config)
    ]


# before and after


def before_after(run: RunHistory) -> dict[str, list[Clip]]:
    """The clips of the first and the last validation as systems; empty if there are fewer than two."""
    validations = validation_clips(run)
    if len(validations) < 2:
        return {}
    first, last = min(validations), max(validations)
    return {f"iteration {step}": validations[step] for step in (first, last)}


def spread(pairs: dict[int, tuple[Clip, Clip]]) -> dict[int, tuple[Clip, Clip]]:
    """At most MAX_ROLLOUTS of the pairs, from the first to the last: each is a video inside the page."""
    steps = list(pairs)
    if len(steps) > MAX_ROLLOUTS:
        positions = np.linspace(0, len(steps) - 1, MAX_ROLLOUTS).round().astype(int)
        steps = [steps[position] for position in positions]
    return {step: pairs[step] for step in steps}


def perfect_scores(run: RunHistory) -> str:
    """What the world's perfect clips score, in a sentence."""
    perfect = run.head.get("perfect") or {}
    if not perfect:
        return ""
    scores = []
    for name, value in perfect.items():
        label = TOTAL if name == "total" else name
        scores.append(f"{label} {number(as_float(value, name))}")
    return f"Perfect clips: {', '.join(scores)}."


# what people preferred


def preference_rows(run: RunHistory) -> list[list[str]]:
    """Win rates of a blind comparison, titles first; empty if there was none."""
    preferences = read_preferences(run.folder)
    if not preferences:
        return []
    titles = ["", "question", "win rate, ties count half"]
    rows = [[f"{row.system} against {row.other}", row.question, str(row)] for row in preferences]
    return [titles, *rows]


# sections


def reward_section(run: RunHistory) -> Section:
    return Section("Reward", figures.reward_panels(run), failures(run))


def failures(run: RunHistory) -> str:
    """What failed during the run, and the first cause."""
    counts = []
    for name, metric in (
        ("failed rewards", "reward/failed"),
        ("groups with fewer than two rewards", "reward/starved_groups"),
        ("groups without spread", "reward/flat_groups"),
    ):
        if run.has(metric):
            counts.append(f"{np.nansum(column(run.all_iteration_lines, metric)):.0f} {name}")
    if run.has("policy/skipped_updates"):  # counted from the start of the run
        skipped = np.nanmax(column(run.all_full_lines, "policy/skipped_updates"))
        counts.append(f"{skipped:.0f} skipped updates")

    text = f"Over the whole run: {', '.join(counts)}." if counts else ""
    errors = [line["reward/error"] for line in run.all_iteration_lines if line.get("reward/error")]
    if errors:
        text += f" The first error of a reward: {errors[0]}"
    return text.strip()


def holdout_section(run: RunHistory) -> Section:
    intro = f"A reward that training never sees, at each validation. {hacking_verdict(run)}"
    return Section("Hold-out", figures.holdout_panels(run), intro)


def hacking_verdict(run: RunHistory) -> str:
    """Whether the last validation shows reward hacking, judged by the held-out reward."""
    if not run.holdouts:
        return ""
    validations = read_validations(run.folder)
    steps = [line["step"] for line in run.validations if line["step"] in validations]
    if not steps:
        return ""
    if len(pair_clips(validations[steps[0]], validations[steps[-1]])) < MIN_PAIRS:
        return "Too few clips for a verdict."
    verdict = divergence(run.folder, steps[-1], steps)
    if verdict is None and len(steps) > 1:  # the held-out reward failed
        return "Too few clips for a verdict."
    return verdict or ""


def gold_section(run: RunHistory, result: Mapping[str, Any] | None) -> Section:
    intro = "An oracle that training never sees measures the clips themselves."
    if result:
        last = list(result["systems"].values())[-1]
        intro += f" {gold_verdict(last['columns'])}"
    return Section("Gold", figures.gold_panels(run), intro.strip())


def gold_verdict(columns: Mapping[str, Mapping[str, Any]]) -> str:
    """Whether reward and gold moved together, by the verdicts on the paired differences."""
    verdicts = {
        name.removeprefix("gold "): cell["verdict"]
        for name, cell in columns.items()
        if name.startswith("gold ") and "verdict" in cell
    }
    if not verdicts or columns.get(TOTAL, {}).get("verdict") != "better":
        return ""
    worse = [name for name, verdict in verdicts.items() if verdict == "worse"]
    better = [name for name, verdict in verdicts.items() if verdict == "better"]
    if worse:
        return (
            f"Here the reward rose and gold got worse ({', '.join(worse)}):"
            " reward hacking. Look at the clips."
        )
    if better:
        return f"Here reward and gold improved together ({', '.join(better)})."
    return "Here gold did not follow the reward."


def update_section(run: RunHistory) -> Section:
    intro = "Bars of validations are 95 % intervals. A metric that is 0 throughout is not drawn."
    return Section("Trust region and updates", figures.update_panels(run), intro)


def denoising_step_section(run: RunHistory) -> Section:
    intro = "One column per iteration, one row per denoising step, noise on top. Gray: not trained."
    return Section("By denoising step", figures.denoising_step_panels(run), intro, layout="maps")


def schedule_section(run: RunHistory) -> Section:
    intro = "What the sampler does at each denoising step."
    return Section("Schedule", figures.schedule_panels(run), intro)


def time_section(run: RunHistory) -> Section:
    return Section("Time", figures.time_panels(run))
