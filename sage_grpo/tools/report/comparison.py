"""The page that compares several runs with the first."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sage_grpo.files.json_files import printable
from sage_grpo.plugins import in_file, label
from sage_grpo.runs.clips import Clip, pair_clips
from sage_grpo.runs.history import RunError, RunHistory
from sage_grpo.tools.figure_style import colors_of, strategy
from sage_grpo.tools.paired import clip_rows, compared, tables, validation_clips
from sage_grpo.tools.report.figures import training_overlays, validation_overlays
from sage_grpo.tools.report.settings import config_of, differing
from sage_grpo.tools.templating import render

WEIGHTING = {"reward_model", "reward_weights"}  # total rewards are comparable only if these agree


def comparison(histories: Sequence[RunHistory]) -> str:
    runs = named(histories)
    clips = last_clips(runs)
    configs = {name: config_of(run) for name, run in runs.items()}
    settings = differing(configs)
    samplers = {name: str(config.get("sde_type")) for name, config in configs.items()}
    strategies = {name: strategy(config) for name, config in configs.items()}
    colors = colors_of(samplers, strategies)

    changed = differing_yardsticks(list(runs.values()))
    same_weighting = not WEIGHTING & {row[0] for row in settings}
    notes = []
    if not same_weighting:
        notes.append(
            "The total rewards are left out: the runs differ in reward_model or reward_weights."
        )
    if changed:
        notes.append(f"The validations differ in {', '.join(changed)}.")
    if any(is_other_reward(name, configs) for name in changed):
        same_weighting = False
        clips = {name: list(map(without_reward, system)) for name, system in clips.items()}
        notes.append("Their rewards are left out: the same names stand for different rewards.")
    return render(
        "comparison.html",
        title=" · ".join(runs),
        runs=runs,
        colors=colors,
        tables=tables(compared(clips, total=same_weighting), " ".join(notes)),
        settings=settings,
        validation_panels=validation_overlays(runs, colors),
        same_weighting=same_weighting,
        rows=clip_rows(clips, total=same_weighting),
        training_panels=training_overlays(runs, colors),
    )


def differing_yardsticks(runs: Sequence[RunHistory]) -> list[str]:
    """Parts of the yardstick in which the last validations of the runs differ, among those that they recorded."""
    recorded = [(run.head.get("yardstick") or {}).get("validation") for run in runs]
    yardsticks = [yardstick for yardstick in recorded if isinstance(yardstick, dict)]
    if not yardsticks:
        return []
    first, *others = yardsticks
    differing = [
        name
        for name in first
        if any(name in other and other[name] != first[name] for other in others)
    ]
    return list(map(printable, differing))


def is_other_reward(name: str, configs: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether runs that differ in this part of the yardstick give different scores the same name.

    An edit of this program's own files need not change what they compute; a plug-in is its file.
    """
    reward, _, part = name.removeprefix("reward ").partition(" ")
    if not name.startswith("reward ") or not part:  # such as the weights of the scores
        return False
    models = [config.get("reward_model") for config in configs.values()]
    names = [str(model) for entry in models if isinstance(entry, list) for model in entry]
    return part != "code" or any(in_file(model) and label(model) == reward for model in names)


def without_reward(clip: Clip) -> Clip:
    """The clip without the scores of its run's reward."""
    values = {name: value for name, value in clip.values.items() if not name.startswith("reward/")}
    return replace(clip, values=values)


def named(histories: Sequence[RunHistory]) -> dict[str, RunHistory]:
    """Runs by the names of their folders, or by full paths where these are not distinct."""
    paths = [run.folder.resolve() for run in histories]
    repeated = [path for path in paths if paths.count(path) > 1]
    if repeated:
        raise RunError(f"{repeated[0]} is named twice; name each run once")
    names = [path.name for path in paths]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    return dict(zip(names, histories, strict=True))


def last_clips(runs: Mapping[str, RunHistory]) -> dict[str, list[Clip]]:
    """The clips of each run's last validation; each run must share some with the first."""
    reference = next(iter(runs))
    clips: dict[str, list[Clip]] = {}
    for name, run in runs.items():
        validations = validation_clips(run)
        if not validations:
            since = f" since iteration {run.breaks[-1]['step']}" if run.breaks else ""
            raise RunError(
                f"{run.folder} has no validation with clips{since}, so it cannot be compared"
            )
        clips[name] = validations[max(validations)]
        if not pair_clips(clips[reference], clips[name]):
            raise RunError(
                f"the last validations of {runs[reference].folder} and {run.folder} have no prompt and seed in common;"
                " compare runs with the same validation prompts and validation_global_seed"
            )
    return clips
