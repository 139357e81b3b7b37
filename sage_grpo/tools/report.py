"""One page about a run: did the reward rise, did the clips get better, was the training healthy?

    python -m sage_grpo.tools.report RUN [--output FILE]

Reads a run folder and writes a single HTML file with all figures and clips in it. docs/metrics.md explains the metrics.
"""

import argparse
import base64
import math
import re
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path

import numpy as np

from sage_grpo.tools import report_figures as figures
from sage_grpo.tools.paired import Clip, Comparison, Measure, Pair, choose_pairs, compare, gain
from sage_grpo.tools.report_drawing import Panel
from sage_grpo.tools.report_style import CSS
from sage_grpo.tools.run_folder import Run, RunError, as_float, column, read_run

MOST_PROMPTS = 12
MOST_BYTES = 40_000_000  # of clips in a page; full-size ones have a few megabytes each
SMALL_CLIP = 128  # pixels: smaller clips are shown with their pixels as they are
HEADLINES = {
    "reward/total": "validation reward",
    "gold/match": "gold match",
    "gold/distance": "distance to the manifold",
}
TROUBLES = {
    "reward/failed": "failed rewards",
    "reward/starved_groups": "groups with fewer than two rewards",
    "reward/flat_groups": "groups without spread",
    "policy/skipped_updates": "skipped updates",
}


def write_report(run: Path, output: Path | None = None) -> Path:
    """Write the page of the run folder `run`, by default into it; returns where it is."""
    output = Path(output) if output else Path(run) / "report.html"
    output.write_text(page(read_run(Path(run))), encoding="utf-8")
    return output


def page(run: Run) -> str:
    comparison = compare(run)
    config = _text(run.folder / "config.yaml")
    gold = "An oracle that training never sees measures the clips themselves. " + hacking(comparison)
    maps = "One column per iteration, one row per denoising step, noise on top. Grey: not trained."
    sections = (
        head(run, comparison, config),
        validation_section(run, comparison),
        section("Reward", figures.reward_panels(run), troubles(run)),
        section("Gold", figures.gold_panels(run), gold),
        clips_section(comparison, config),
        section("Trust region and updates", figures.update_panels(run)),
        section("By denoising step", figures.map_panels(run), maps, style="maps"),
        section("Schedule", figures.schedule_panels(run), "What the sampler does at each denoising step."),
        section("Time", figures.time_panels(run), extra=time_table(run)),
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(run.name)}</title><style>{CSS}</style></head>\n"
        f"<body><main>{''.join(sections)}</main></body></html>\n"
    )


def section(title: str, panels: Sequence[Panel], intro: str = "", style: str = "", extra: str = "") -> str:
    """Panels under a heading; nothing without panels. `extra` is HTML that follows the panels."""
    if not panels:
        return ""
    cards = "".join(
        f'<figure class="{panel.style}"><h3>{escape(panel.title)}</h3>{panel.picture}'
        f"<figcaption>{escape(panel.words)}</figcaption></figure>"
        for panel in panels
    )
    return f'{heading(title, intro)}<div class="panels {style}">{cards}{extra}</div>\n'


def heading(title: str, intro: str) -> str:
    return f"<h2>{escape(title)}</h2>" + (f'<p class="intro">{escape(intro)}</p>' if intro else "")


def head(run: Run, comparison: Comparison | None, config: str) -> str:
    parts = [f'<h1>{escape(run.name)}</h1><p class="summary">{escape(summary(run, comparison))}</p>']
    parts.append(tiles(run, comparison))
    command = _text(run.folder / "command.txt")
    if command:
        parts.append(f'<pre class="command">{escape(command)}</pre>')
    parts.append(f'<p class="facts">{escape(facts(run))}</p>')
    if config:
        parts.append(f"<details><summary>Configuration</summary><pre>{escape(config)}</pre></details>")
    return "".join(parts)


def summary(run: Run, comparison: Comparison | None) -> str:
    """The run in a sentence or two."""
    done = run.train[-1]["step"] if run.train else 0
    text = f"{done} iteration{'' if done == 1 else 's'}. "
    if comparison and comparison.measures:
        measures = {HEADLINES[key]: comparison.measures[key] for key in HEADLINES if key in comparison.measures}
        moves = [f"{name} {before_after(measure)}" for name, measure in measures.items()]
        text += f"From iteration {comparison.steps[0]} to {comparison.steps[1]}: {', '.join(moves)}."
        gap = gap_closed(run, comparison)
        return text if gap is None else f"{text} That closes {gap:.0f} % of the gap to perfect clips."
    if run.validations:
        line = run.validations[-1]
        return f"{text}Validation reward {number(as_float(line.get('reward/total')))} at iteration {line['step']}."
    if run.has("reward/total"):
        values = column(run.train, "reward/total")
        values = values[np.isfinite(values)]
        ends = max(1, len(values) // 10)
        means = f"{number(values[:ends].mean())} → {number(values[-ends:].mean())}"
        text += f"Reward in training {means} (first and last tenth); there was no validation."
    return text


def before_after(measure: Measure) -> str:
    values = ((measure.before, measure.before_error), (measure.after, measure.after_error))
    return " → ".join(" ± ".join(number(value, measure.decimals) for value in pair) for pair in values)


def gap_closed(run: Run, comparison: Comparison | None) -> float | None:
    """Per cent of the way from the first validation reward to that of perfect clips."""
    perfect = as_float((run.head.get("perfect") or {}).get("total"))
    measure = comparison and comparison.measures.get("reward/total")
    if not measure or not perfect > measure.before:
        return None
    return 100 * (measure.after - measure.before) / (perfect - measure.before)


def tiles(run: Run, comparison: Comparison | None) -> str:
    measures = comparison.measures if comparison else {}
    shown = {
        HEADLINES[key]: f"{number(measures[key].before)} → {number(measures[key].after)}"
        for key in HEADLINES
        if key in measures
    }
    gap = gap_closed(run, comparison)
    if gap is not None:
        shown["of the gap closed"] = f"{gap:.0f} %"
    if run.has("time/total"):
        shown["in iterations"] = duration(np.nansum(column(run.train, "time/total")))
    if run.has("memory/peak_gb"):
        shown["peak memory"] = f"{np.nanmax(column(run.train, 'memory/peak_gb')):.3g} GB"
    cells = (f'<div class="tile"><b>{value}</b><span>{name}</span></div>' for name, value in shown.items())
    return f'<div class="tiles">{"".join(cells)}</div>' if shown else ""


def facts(run: Run) -> str:
    """Machine, size and versions, as far as the run says."""
    line = run.head
    parts = [line.get("device"), f"world {line['world']}" if line.get("world") else None]
    parts += [f"{line['ranks']} ranks"] if (line.get("ranks") or 1) > 1 else []
    parts += [f"{line['trainable_parameters']:,} trainable parameters"] if line.get("trainable_parameters") else []
    parts += [f"{name} {version}" for name, version in (line.get("versions") or {}).items()]
    parts += [f"started {run.starts[0]['time']}"] if run.starts and run.starts[0].get("time") else []
    parts += [f"resumed {len(run.starts) - 1} ×"] if len(run.starts) > 1 else []
    return " · ".join(part for part in parts if part)


def troubles(run: Run) -> str:
    found = [f"{np.nansum(column(run.train, key)):.0f} {name}" for key, name in TROUBLES.items() if run.has(key)]
    return f"Over the whole run: {', '.join(found)}." if found else ""


def hacking(comparison: Comparison | None) -> str:
    """Whether reward and gold moved together, judged by intervals that leave out 0."""
    measures = comparison.measures if comparison else {}
    total = measures.get("reward/total")
    gold = {key[5:].replace("_", " "): value.verdict for key, value in measures.items() if key.startswith("gold/")}
    if not gold or not total or total.verdict < 1:
        return ""
    worse, better = (", ".join(name for name in gold if gold[name] == sign) for sign in (-1, 1))
    if worse:
        return f"Here the reward rose and gold got worse ({worse}): reward hacking. Look at the clips."
    return f"Here reward and gold improved together ({better})." if better else "Here gold did not follow the reward."


def validation_section(run: Run, comparison: Comparison | None) -> str:
    if not comparison or not comparison.measures:
        return ""
    perfect = {f"reward/{name}": value for name, value in (run.head.get("perfect") or {}).items()}
    rows = "".join(validation_row(key, measure, perfect.get(key)) for key, measure in comparison.measures.items())
    before, after = comparison.steps
    titles = ("", f"iteration {before}", f"iteration {after}", "paired difference", "95 % interval", "perfect clips")
    intro = (
        f"{len(comparison.pairs)} clips of held-out prompts, sampled without noise, same seeds before and after. "
        "± is the standard error. Differences are taken clip by clip; green or red: the interval leaves out 0."
    )
    header = "".join(f"<th>{title}</th>" for title in titles)
    table = f'<div class="scroll"><table><tr>{header}</tr>{rows}</table></div>\n'
    return heading("Before and after", intro) + table


def validation_row(key: str, measure: Measure, perfect: float | None) -> str:
    style = {1: "good", -1: "bad", 0: ""}[measure.verdict]
    decimals, ends = measure.decimals, (measure.difference - measure.half, measure.difference + measure.half)
    cells = (
        f"{number(measure.before, decimals)} <small>± {number(measure.before_error, decimals)}</small>",
        f"{number(measure.after, decimals)} <small>± {number(measure.after_error, decimals)}</small>",
        f'<b class="{style}">{number(measure.difference, decimals, "+")}</b>',
        " to ".join(number(end, decimals, "+") for end in ends) if math.isfinite(measure.half) else "–",
        number(as_float(perfect)),
    )
    name = key.removeprefix("reward/") if key.startswith("reward/") else key.replace("/", " ", 1).replace("_", " ")
    lower = " <small>lower is better</small>" if measure.better < 0 else ""
    return f"<tr><td>{escape(name)}{lower}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def clips_section(comparison: Comparison | None, config: str) -> str:
    pairs = choose_pairs(comparison.pairs, MOST_PROMPTS, MOST_BYTES) if comparison else []
    if not pairs:
        return ""
    sides = [int(side) for side in re.findall(r"^(?:height|width): (\d+)$", config, re.MULTILINE)]
    style = "small" if sides and min(sides) < SMALL_CLIP else ""
    intro = (
        f"{len(pairs)} prompts, each with the same seed before and after. Chosen by the change of the reward: "
        "first the largest gains, then the middle, last the largest losses."
    )
    cards = "".join(clip_card(pair, comparison.steps, style) for pair in pairs)
    return f'{heading("Clips", intro)}<div class="cards">{cards}</div>\n'


def clip_card(pair: Pair, steps: tuple[int, int], style: str) -> str:
    sides = "".join(clip_side(clip, step, style) for clip, step in zip(pair, steps, strict=True))
    colour = "good" if gain(pair) > 0 else "bad"
    change = f'reward <b class="{colour}">{number(gain(pair), sign="+")}</b>'
    return (
        f'<figure class="card"><h3>{escape(pair[0].prompt)}</h3><div class="pair">{sides}</div>'
        f"<figcaption>{change}, seed {escape(str(pair[0].seed))}</figcaption></figure>"
    )


def clip_side(clip: Clip, step: int, style: str) -> str:
    scores = ", ".join(
        f"{escape(key.partition('/')[2].replace('_', ' '))}&nbsp;{number(value, 3 if key.endswith('distance') else 2)}"
        for key, value in clip.values.items()
        if key != "reward/total"
    )
    video = base64.b64encode(clip.path.read_bytes()).decode()
    return (
        f'<div><video class="{style}" autoplay loop muted playsinline src="data:video/mp4;base64,{video}"></video>'
        f"iteration {step}: <b>{number(clip.reward)}</b><br><small>{scores}</small></div>"
    )


def time_table(run: Run) -> str:
    seconds = {name: float(values.sum()) for name, values in figures.phase_seconds(run).items()}
    rows = "".join(
        f'<tr><td><span class="swatch" style="background:{figures.PHASES[name]}"></span>{name}</td>'
        f"<td>{duration(spent)}</td><td>{duration(spent / len(run.train))}</td>"
        f"<td>{100 * spent / sum(seconds.values()):.0f} %</td></tr>"
        for name, spent in seconds.items()
    )
    notes = []
    if run.has("memory/peak_gb"):
        memory = column(run.train, "memory/peak_gb")
        notes.append(f"Peak memory {np.nanmax(memory):.3g} GB, at iteration {run.train[np.nanargmax(memory)]['step']}.")
    validation = np.nansum(column(run.validations, "time/validation"))
    notes += [f"Validation took {duration(validation)} more."] if validation else []
    return (
        '<figure><h3>Shares</h3><div class="scroll"><table><tr><th></th><th>in all</th><th>each</th><th>share</th></tr>'
        f"{rows}</table></div><figcaption>{' '.join(notes)}</figcaption></figure>"
    )


def number(value: float, decimals: int = 3, sign: str = "") -> str:
    """One digit where the decimals would show none; a dash for NaN."""
    if not math.isfinite(value):
        return "–"
    form = f".{decimals}f" if value == 0 or round(value, decimals) else ".1g"
    return f"{value:{sign}{form}}".replace("-", "−")


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace").strip() if path.is_file() else ""


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
