"""One page about a run: did the reward rise, did the clips get better, was the training healthy?

    python -m sage_grpo.tools.report RUN [--output FILE]

Reads a run folder and writes one self-contained HTML file with figures and clips. docs/metrics.md explains the metrics.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import yaml

from sage_grpo.config import Config, ConfigError
from sage_grpo.flags import yaml_mapping
from sage_grpo.runs.clips import divergence, read_validations
from sage_grpo.runs.history import RunError, RunHistory, as_float, column, read_run
from sage_grpo.tools.paired import Comparison, aligned, choose_pairs, compare, number, table
from sage_grpo.tools.report_figures import panels
from sage_grpo.tools.templating import render

MOST_PROMPTS = 12
TEXTS = ("command.txt", "config.yaml")
HEADLINES = {
    "validation reward": "reward/total",
    "gold match": "gold/match",
    "distance to the manifold": "gold/distance",
}
TROUBLES = {
    "failed rewards": ("reward/failed", np.nansum),
    "groups with fewer than two rewards": ("reward/starved_groups", np.nansum),
    "groups without spread": ("reward/flat_groups", np.nansum),
    "skipped updates": ("policy/skipped_updates", np.nanmax),  # cumulative over the run
}


def write_report(run: Path, output: Path | None = None) -> Path:
    """Write the page for the run folder `run`, by default into that folder; returns its path."""
    output = output or run / "report.html"
    refuse_links(run)
    output.write_text(page(read_run(run)), encoding="utf-8", errors="replace")
    return output


def refuse_links(run: Path) -> None:
    """A page is shown to others: a link in a run folder from elsewhere could put any file of this machine into it."""
    for pattern in (*TEXTS, "metrics.jsonl", "report.html", "validation", "validation/*", "validation/*/*"):
        if link := next((path for path in run.glob(pattern) if path.is_symlink()), None):
            raise RunError(f"{link} is a link, which a report does not follow; replace it by what it leads to")


def page(run: RunHistory) -> str:
    comparison = compare(run)
    files = [run.folder / name for name in TEXTS]
    command, config = (f.read_text("utf-8", "replace").strip() if f.is_file() else "" for f in files)
    return render(
        "report.html",
        title=run.folder.resolve().name,
        results=results(run),
        command=command,
        run=run,
        changed=changed(config),
        config=config,
        table=table(run, comparison),
        comparison=comparison,
        pairs=choose_pairs(comparison.pairs, MOST_PROMPTS) if comparison else [],
        panels=panels(run),
        troubles=troubles(run),
        divergence=parted(run),
        hacking=hacking(comparison),
    )


def changed(config: str) -> str:
    """The lines of a configuration that differ from the defaults."""
    values, defaults = yaml_mapping(config, "config.yaml") if config else {}, yaml.safe_load(Config().to_yaml())
    differing = [key for key in values if key not in defaults or values[key] != defaults[key]]
    return "\n".join(f"{key}: {values[key]}" for key in differing)


def results(run: RunHistory) -> dict[str, str]:
    """Name -> value for everything measured; before and after are the first and the last validation."""
    ends = run.validations[:1] + run.validations[1:][-1:]
    shown = {"iterations": str(run.train[-1]["step"] if run.train else 0)}
    for name, key in HEADLINES.items():
        if ends and run.measured(key):
            shown[name] = " → ".join(map(number, column(ends, key)))
    perfect, totals = as_float((run.head.get("perfect") or {}).get("total"), "total"), column(ends, "reward/total")
    if len(totals) == 2 and perfect > totals[0]:
        shown["of the gap to perfect clips"] = f"{100 * (totals[1] - totals[0]) / (perfect - totals[0]):.0f} %"
    if run.has("time/total"):
        each = run.train[-1]["step"] / len(run.train)  # iterations per logged line, which alone have gold
        total, gold = (np.nansum(column(run.train, f"time/{part}")) for part in ("total", "gold"))
        shown["in iterations"] = f"{(each * (total - gold) + gold) / 60:.3g} min"
    if run.has("memory/peak_gb"):
        shown["peak memory"] = f"{np.nanmax(column(run.train, 'memory/peak_gb')):.3g} GB"
    return shown


def troubles(run: RunHistory) -> str:
    """Failures during the run, and their causes."""
    counts = {name: whole(column(run.train, key)) for name, (key, whole) in TROUBLES.items() if run.has(key)}
    said = f"Over the whole run: {', '.join(f'{n:.0f} {name}' for name, n in counts.items())}." if counts else ""
    errors = [line["reward/error"] for line in run.train if line.get("reward/error")]
    return f"{said} The first error of a reward: {errors[0]}" if errors else said


def hacking(comparison: Comparison | None) -> str:
    """Whether reward and gold moved together, judged by intervals that exclude 0."""
    measures = comparison.measures if comparison else {}
    gold = {key[5:].replace("_", " "): value.verdict for key, value in measures.items() if key.startswith("gold/")}
    if not gold or "reward/total" not in measures or measures["reward/total"].verdict < 1:
        return ""
    worse, better = (", ".join(name for name in gold if gold[name] == sign) for sign in (-1, 1))
    if worse:
        return f"Here the reward rose and gold got worse ({worse}): reward hacking. Look at the clips."
    return f"Here reward and gold improved together ({better})." if better else "Here gold did not follow the reward."


def parted(run: RunHistory) -> str:
    """Whether the last validation shows reward hacking, judged by the held-out reward."""
    kept = read_validations(run.folder)
    known = [line["step"] for line in run.validations if line["step"] in kept] if run.holdouts else []
    return divergence(run.folder, known[-1]) if known else ""


def print_summary(folder: Path) -> None:
    """Print a table of a run's results and write the page; a full disk does not make the run fail."""
    try:
        run = read_run(folder)
        print(aligned(table(run, compare(run))))
        print(f"report: {write_report(folder)}")
    except (OSError, ConfigError) as error:
        later = f"`python -m sage_grpo.tools.report {folder}` makes it"
        print(f"the run is done, but its report could not be written: {error}; {later}", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m sage_grpo.tools.report", description="One HTML page about a run.")
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: RUN/report.html")
    options = parser.parse_args(arguments)
    try:
        print(write_report(options.run, options.output))
    except (OSError, ConfigError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
