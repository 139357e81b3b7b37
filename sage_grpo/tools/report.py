"""One page about a run: did the reward rise, did the clips get better, was the training healthy?

    python -m sage_grpo.tools.report RUN [--output FILE]

Reads a run folder and writes a single HTML file with all figures and clips in it. docs/metrics.md explains the metrics.
"""

import argparse
import base64
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path

import numpy as np
import yaml

from sage_grpo.config import Config
from sage_grpo.flags import yaml_mapping
from sage_grpo.tools.paired import Comparison, Pair, choose_pairs, compare, gain, number, table, text_table
from sage_grpo.tools.report_figures import panels
from sage_grpo.tools.run_folder import Run, RunError, as_float, column, read_run
from sage_grpo.train.hacking import divergence, validations

MOST_PROMPTS = 12
HEADLINES = {
    "validation reward": "reward/total",
    "gold match": "gold/match",
    "distance to the manifold": "gold/distance",
}
TROUBLES = {
    "failed rewards": ("reward/failed", np.nansum),
    "groups with fewer than two rewards": ("reward/starved_groups", np.nansum),
    "groups without spread": ("reward/flat_groups", np.nansum),
    "skipped updates": ("policy/skipped_updates", np.nanmax),  # counted from the start of the run
}
CSS = """
:root { --soft: #52606d; --line: #e1e6eb; }
body { margin: 0; background: #f6f7f9; color: #1f2933;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
* { box-sizing: border-box; } main { max-width: 1200px; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0; } h2 { font-size: 1.3rem; margin: 3rem 0 .3rem; }
h3 { font-size: .95rem; margin: 0 0 .4rem; } h1, h3 { overflow-wrap: anywhere; }
p, summary { color: var(--soft); font-size: .93rem; margin: .3rem 0; }
.tile, .scroll, figure, pre { background: #fff; border: 1px solid var(--line); border-radius: 10px; margin: 0;
  padding: .75rem .9rem; min-width: 0; }
pre { font: .82rem/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; white-space: pre-wrap;
  overflow-wrap: anywhere; columns: 4 18rem; }
pre.command { user-select: all; border-left: 3px solid #2f6690; columns: auto; }
.tiles, .panels, .maps { display: grid; gap: 1rem; margin: .9rem 0;
  grid-template-columns: repeat(auto-fill, minmax(min(340px, 100%), 1fr)); }
.tiles { grid-template-columns: repeat(auto-fill, minmax(min(145px, 46%), 1fr)); }
.maps { grid-template-columns: repeat(auto-fill, minmax(min(460px, 100%), 1fr)); }
.tile { padding: .65rem .7rem; } .tile b { display: block; font-size: .98rem; white-space: nowrap; }
.tile span, small, th { color: #7b8794; font-size: .8rem; font-weight: 500; }
figure.wide { grid-column: span 2; } figure svg text { font-family: inherit !important; }
figure svg, video { display: block; width: 100%; height: auto; border-radius: 6px; }
figcaption { color: var(--soft); font-size: .84rem; line-height: 1.4; margin-top: .45rem; }
.scroll { overflow-x: auto; margin: .9rem 0; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .42rem .5rem; white-space: nowrap; }
tr + tr { border-top: 1px solid var(--line); } th:first-child, td:first-child { text-align: left; padding-left: 0; }
.better { color: #2f7d57; } .worse { color: #b4433a; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: .6rem; font-size: .8rem; }
@media (min-width: 781px) { figure.wide svg text { font-size: 7px !important; } }
@media (max-width: 780px) { figure.wide { grid-column: auto; } main { padding: 1.5rem .8rem 3rem; }
  td:first-child { white-space: normal; } }
"""


def write_report(run: Path, output: Path | None = None) -> Path:
    """Write the page of the run folder `run`, by default into it; returns where it is."""
    output = Path(output) if output else Path(run) / "report.html"
    output.write_text(page(read_run(Path(run))), encoding="utf-8")
    return output


def page(run: Run) -> str:
    comparison, name = compare(run), escape(run.folder.resolve().name)
    intros = {
        "Reward": troubles(run),
        "Hold-out": f"A reward that training never sees, at each validation. {escape(parted(run))}",
        "Gold": f"An oracle that training never sees measures the clips themselves. {hacking(comparison)}",
        "By denoising step": "One column per iteration, one row per denoising step, noise on top. Grey: not trained.",
        "Schedule": "What the sampler does at each denoising step.",
    }
    sections = [section(title, cards, intros.get(title, "")) for title, cards in panels(run).items()]
    if comparison:
        sections.insert(0, validation_section(run, comparison))
        sections.insert(4, clips_section(comparison))  # after reward, hold-out and gold
    return document(name, head(run) + "".join(sections))


def document(title: str, body: str) -> str:
    """A page under its title, both HTML already."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width, initial-scale=1"><title>{title}</title><style>{CSS}</style></head>\n'
        f"<body><main><h1>{title}</h1>{body}</main></body></html>\n"
    )


def section(title: str, cards: Sequence[str], intro: str) -> str:
    """Cards under a heading; nothing without cards."""
    style = "maps" if title == "By denoising step" else "panels"
    return f'<h2>{title}</h2><p>{intro}</p><div class="{style}">{"".join(cards)}</div>\n' if cards else ""


def head(run: Run) -> str:
    """Results, the exact command, the machine, the configuration."""
    files = [run.folder / name for name in ("command.txt", "config.yaml")]
    command, config = (file.read_text().strip() if file.is_file() else "" for file in files)
    tiles = (f'<div class="tile"><b>{value}</b><span>{name}</span></div>' for name, value in results(run).items())
    return (
        f'<div class="tiles">{"".join(tiles)}</div><pre class="command">{escape(command)}</pre>'
        f"<p>{escape(facts(run))}</p><p>Not the defaults:</p><pre>{escape(changed(config))}</pre>"
        f"<details><summary>The whole configuration</summary><pre>{escape(config)}</pre></details>"
    )


def changed(config: str) -> str:
    """The lines of a configuration that are not the defaults."""
    values, defaults = yaml_mapping(config, "config.yaml") if config else {}, yaml.safe_load(Config().to_yaml())
    differing = [key for key in values if key not in defaults or values[key] != defaults[key]]
    return "\n".join(f"{key}: {values[key]}" for key in differing)


def results(run: Run) -> dict[str, str]:
    """Name -> value, as far as they were measured; before and after are the first and the last validation."""
    ends = run.validations[:1] + run.validations[1:][-1:]
    shown = {"iterations": str(run.train[-1]["step"] if run.train else 0)}
    for name, key in HEADLINES.items():
        if ends and run.measured(key):
            shown[name] = " → ".join(map(number, column(ends, key)))
    perfect, totals = as_float((run.head.get("perfect") or {}).get("total")), column(ends, "reward/total")
    if len(totals) == 2 and perfect > totals[0]:
        shown["of the gap to perfect clips"] = f"{100 * (totals[1] - totals[0]) / (perfect - totals[0]):.0f} %"
    if run.has("time/total", "memory/peak_gb"):
        unlogged = run.train[-1]["step"] / len(run.train)  # iterations for each line
        shown["in iterations"] = f"{unlogged * np.nansum(column(run.train, 'time/total')) / 60:.3g} min"
        shown["peak memory"] = f"{np.nanmax(column(run.train, 'memory/peak_gb')):.3g} GB"
    return shown


def facts(run: Run) -> str:
    """Machine, size and versions, as far as the run says."""
    line = {"ranks": 1, "versions": {}} | run.head
    parts = [line.get("device"), line.get("world") and f"world {line['world']}"]
    parts += [f"{line['ranks']} ranks"] if line["ranks"] > 1 else []
    parts += [f"{line['trainable_parameters']:,} trainable parameters"] if "trainable_parameters" in line else []
    parts += [f"{name} {version}" for name, version in line["versions"].items()]
    parts += [f"started {start['time']}" for start in run.starts[:1]]
    parts += [f"resumed {len(run.starts) - 1} ×"] if len(run.starts) > 1 else []
    return " · ".join(part for part in parts if part)


def troubles(run: Run) -> str:
    """What was lost on the way, and why."""
    counts = {name: whole(column(run.train, key)) for name, (key, whole) in TROUBLES.items() if run.has(key)}
    said = f"Over the whole run: {', '.join(f'{n:.0f} {name}' for name, n in counts.items())}." if counts else ""
    errors = [line["reward/error"] for line in run.train if line.get("reward/error")]
    return f"{said} The first error of a reward: {escape(errors[0])}" if errors else said


def hacking(comparison: Comparison | None) -> str:
    """Whether reward and gold moved together, judged by intervals that leave out 0."""
    measures = comparison.measures if comparison else {}
    gold = {key[5:].replace("_", " "): value.verdict for key, value in measures.items() if key.startswith("gold/")}
    if not gold or "reward/total" not in measures or measures["reward/total"].verdict < 1:
        return ""
    worse, better = (", ".join(name for name in gold if gold[name] == sign) for sign in (-1, 1))
    if worse:
        return f"Here the reward rose and gold got worse ({worse}): reward hacking. Look at the clips."
    return f"Here reward and gold improved together ({better})." if better else "Here gold did not follow the reward."


def parted(run: Run) -> str:
    """Whether the last validation shows reward hacking, judged by the held-out reward."""
    kept = validations(run.folder)
    known = [line["step"] for line in run.validations if line["step"] in kept] if run.holdouts else []
    return divergence(run.folder, known[-1]) if known else ""


def validation_section(run: Run, comparison: Comparison) -> str:
    titles, *rows = table(run, comparison)
    lines = ["".join(f"<th>{title}</th>" for title in titles)]
    for name, before, after, difference, interval, verdict, perfect in rows:
        marked = f'<b class="{verdict}">{difference}</b>'
        cells = (escape(name), before, after, marked, interval, verdict, perfect)
        lines.append("".join(f"<td>{cell}</td>" for cell in cells))
    return (
        f"<h2>Before and after</h2><p>{len(comparison.pairs)} clips of held-out prompts, sampled without noise, same "
        "seeds before and after. ± is the standard error. Differences are taken clip by clip; green or red: the "
        f'interval leaves out 0.</p><div class="scroll"><table><tr>{"</tr><tr>".join(lines)}</tr></table></div>\n'
    )


def clips_section(comparison: Comparison) -> str:
    cards = [clip_card(pair, comparison.steps) for pair in choose_pairs(comparison.pairs, MOST_PROMPTS)]
    intro = "Same seed before and after. First the largest gains of reward, then the middle, last the largest losses."
    return section("Clips", cards, intro)


def clip_card(pair: Pair, steps: tuple[int, int]) -> str:
    sides = ""
    for clip, step in zip(pair, steps, strict=True):
        scores = {key.partition("/")[2].replace("_", " "): value for key, value in clip.values.items()}
        words = ", ".join(f"{escape(name)}&nbsp;{number(scores[name])}" for name in scores if name != "total")
        said = f"iteration {step}: <b>{number(clip.reward)}</b><br><small>{words}</small>"
        sides += f"<div>{video(clip.path)}{said}</div>"
    change = f'<b class="{"better" if gain(pair) > 0 else "worse"}">{number(gain(pair), sign="+")}</b>'
    return (
        f'<figure><h3>{escape(pair[0].prompt)}</h3><div class="pair">{sides}</div>'
        f"<figcaption>reward {change}, seed {escape(str(pair[0].seed))}</figcaption></figure>"
    )


def video(path: Path) -> str:
    """The clip itself, inside the page."""
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<video autoplay loop muted playsinline src="data:video/mp4;base64,{data}"></video>'


def tell(folder: Path) -> None:
    """What came out of a run, as a table and the page; without room for the page it is done all the same."""
    try:
        print(text_table(read_run(folder)))
        print(f"report: {write_report(folder)}")
    except (OSError, RunError) as error:
        later = f"`python -m sage_grpo.tools.report {folder}` makes it"
        print(f"the run is done, but its report could not be written: {error}; {later}", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m sage_grpo.tools.report", description="One HTML page about a run.")
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: RUN/report.html")
    options = parser.parse_args(arguments)
    try:
        print(write_report(options.run, options.output))
    except RunError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
