"""The pages: of one run, and of several compared with the first."""

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from sage_grpo.config.fields import Config, ConfigError
from sage_grpo.config.yaml_files import yaml_mapping
from sage_grpo.intervals import FEWEST
from sage_grpo.runs.clips import Clip, pair_clips, read_validations
from sage_grpo.runs.diagnosis import diagnose
from sage_grpo.runs.hacking import divergence
from sage_grpo.runs.history import RunError, RunHistory, read_run
from sage_grpo.tools.figure_style import colors_of, strategy
from sage_grpo.tools.paired import aligned, clip_rows, compared, tables, validation_clips
from sage_grpo.tools.report.figures import overlays, panels
from sage_grpo.tools.templating import render

TEXTS = ("command.txt", "config.yaml")


READ = (
    *TEXTS,
    "metrics.jsonl",
    "report.html",
    "validation",
    "validation/*",
    "validation/*/*",
)  # of a run folder


DEFAULTS = yaml.safe_load(Config().to_yaml())


WEIGHTING = {"reward_model", "reward_weights"}  # total rewards are comparable only if these agree


def write_report(*folders: Path, output: Path | None = None) -> Path:
    """Write the page of a run, by default into its folder, or one that compares several; returns its path."""
    # a page is shown to others: a link in a run folder from elsewhere could put any file of this machine into it
    read = (path for folder in folders for pattern in READ for path in folder.glob(pattern))
    if link := next((path for path in read if path.is_symlink()), None):
        raise RunError(
            f"{link} is a link, which a report does not follow; replace it by what it leads to"
        )
    runs = [read_run(folder) for folder in folders]
    output = output or (Path("comparison.html") if len(runs) > 1 else folders[0] / "report.html")
    output.write_text(
        comparison(runs) if len(runs) > 1 else page(*runs), encoding="utf-8", errors="replace"
    )
    return output


def page(run: RunHistory) -> str:
    command, config = (text_of(run, name) for name in TEXTS)
    clips, findings = before_after(run), []
    with suppress(ConfigError):  # of an edited configuration, which the page shows anyway
        findings = diagnose(run)
    result = compared(clips, total=True) if clips else {}
    changed = differing({"here": config_of(run), "default": DEFAULTS}) if config else []
    values = {"run": run, "command": command, "config": config, "changed": changed}
    values |= {
        "compared": result,
        "tables": tables(result) if result else [],
        "rows": clip_rows(clips, total=True),
    }
    values |= {"panels": panels(run), "divergence": parted(run), "findings": findings}
    return render("report.html", title=run.folder.resolve().name, **values)


def comparison(histories: Sequence[RunHistory]) -> str:
    """The page of several runs, each against the first."""
    runs = named(histories)
    clips, configs = last_clips(runs), {name: config_of(run) for name, run in runs.items()}
    samplers = {name: str(config.get("sde_type")) for name, config in configs.items()}
    colors = colors_of(samplers, {name: strategy(config) for name, config in configs.items()})
    settings = differing(configs)
    total = not WEIGHTING & {row[0] for row in settings}
    values = {
        "runs": runs,
        "colors": colors,
        "total": total,
        "settings": settings,
        "panels": overlays(runs, colors),
    }
    rows, found = clip_rows(clips, total), tables(compared(clips, total))
    return render("comparison.html", title=" · ".join(runs), tables=found, rows=rows, **values)


def named(histories: Sequence[RunHistory]) -> dict[str, RunHistory]:
    """Runs by the names of their folders, or by whole paths where these are not distinct."""
    paths = [run.folder.resolve() for run in histories]
    if twice := next((path for path in paths if paths.count(path) > 1), None):
        raise RunError(f"{twice} is named twice; name each run once")
    names = [path.name for path in paths]
    return dict(
        zip(names if len(set(names)) == len(names) else map(str, paths), histories, strict=True)
    )


def last_clips(runs: Mapping[str, RunHistory]) -> dict[str, list[Clip]]:
    """The clips of each run's last validation; each run must share some with the first."""
    found = {}
    for name, run in runs.items():
        validations = validation_clips(run)
        if not validations:
            raise RunError(f"{run.folder} has no validation with clips, so it cannot be compared")
        found[name] = validations[max(validations)]
        if not pair_clips(found[first := next(iter(found))], found[name]):
            both = f"{runs[first].folder} and {run.folder}"
            remedy = "compare runs with the same validation prompts and validation_global_seed"
            raise RunError(
                f"the last validations of {both} have no prompt and seed in common; {remedy}"
            )
    return found


def text_of(run: RunHistory, name: str) -> str:
    file = run.folder / name
    return file.read_text("utf-8", "replace").strip() if file.is_file() else ""


def config_of(run: RunHistory) -> dict[str, Any]:
    """The settings of a run; those that its version did not know yet are today's defaults."""
    return (
        DEFAULTS | yaml_mapping(text, "config.yaml")
        if (text := text_of(run, "config.yaml"))
        else {}
    )


def differing(configs: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """The settings that differ, one row each: name, then its value in every run."""
    keys = dict.fromkeys(
        key for config in configs.values() for key in config if key != "output_dir"
    )
    rows = [[str(key), *(str(config.get(key, "–")) for config in configs.values())] for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]


def before_after(run: RunHistory) -> dict[str, list[Clip]]:
    """The clips of the first and the last validation as systems; empty if there are fewer than two."""
    found = validation_clips(run)
    return (
        {f"iteration {step}": found[step] for step in (min(found), max(found))}
        if len(found) > 1
        else {}
    )


def parted(run: RunHistory) -> str:
    """Whether the last validation shows reward hacking, judged by the held-out reward."""
    kept = read_validations(run.folder)
    known = (
        [line["step"] for line in run.validations if line["step"] in kept] if run.holdouts else []
    )
    if known and len(pair_clips(kept[min(kept)], kept[known[-1]])) < FEWEST:
        return "Too few clips for a verdict."
    return divergence(run.folder, known[-1]) if known else ""


def print_summary(folder: Path) -> None:
    """Print a table of a run's results and write the page; a full disk does not make the run fail."""
    try:
        clips = before_after(read_run(folder))
        print(*map(aligned, tables(compared(clips, total=True)) if clips else ()), sep="\n\n")
        print(f"report: {write_report(folder)}")
    except (OSError, ConfigError) as error:
        later = f"`python -m sage_grpo.tools.report {folder}` makes it"
        print(
            f"the run is done, but its report could not be written: {error}; {later}",
            file=sys.stderr,
        )
