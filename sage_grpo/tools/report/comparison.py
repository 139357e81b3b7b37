"""The page that compares several runs with the first."""

from collections.abc import Mapping, Sequence

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

    same_weighting = not WEIGHTING & {row[0] for row in settings}
    note = ""
    if not same_weighting:
        note = "The total rewards are left out: the runs differ in reward_model or reward_weights."
    return render(
        "comparison.html",
        title=" · ".join(runs),
        runs=runs,
        colors=colors,
        tables=tables(compared(clips, total=same_weighting), note),
        settings=settings,
        validation_panels=validation_overlays(runs, colors),
        same_weighting=same_weighting,
        rows=clip_rows(clips, total=same_weighting),
        training_panels=training_overlays(runs, colors),
    )


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
            raise RunError(f"{run.folder} has no validation with clips, so it cannot be compared")
        clips[name] = validations[max(validations)]
        if not pair_clips(clips[reference], clips[name]):
            raise RunError(
                f"the last validations of {runs[reference].folder} and {run.folder} have no prompt and seed in common;"
                " compare runs with the same validation prompts and validation_global_seed"
            )
    return clips
