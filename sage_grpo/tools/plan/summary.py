"""What the planner prints: one plan in full, or a line per value of a flag."""

from collections.abc import Sequence
from pathlib import Path

from sage_grpo.rewards.registry import ALIASES
from sage_grpo.tools.paired import aligned
from sage_grpo.tools.plan.calibration import MEASURED_ON
from sage_grpo.tools.plan.memory import (
    MOMENTS,
    checkpoint_bytes,
    disk_bytes,
    export_bytes,
    fits,
    host_bytes,
    memory,
    offloaded_bytes,
    peak,
    snapshot_bytes,
    swapped_bytes,
)
from sage_grpo.tools.plan.model import Plan
from sage_grpo.tools.plan.remedies import MAX_GPUS, Change, all_words
from sage_grpo.tools.plan.times import (
    clips_per_gpu_hour,
    run_time,
    times,
    validation_time,
    volumes,
    waiting_time,
)
from sage_grpo.train.validation import validation_sampling

GB = 1e9  # bytes
PAPER_CLIPS = 25_600  # clips that the paper trained on
DISK_SPEEDS = (0.3, 1, 3)  # GB/s
FEW_PROMPTS = 8


def summarize(
    plan: Plan,
    *,
    validation_clips: int,
    gpu_bytes: float,
    price: float | None,
    changes: Sequence[Change],
) -> str:
    """All about one plan. `price` of a GPU-hour; `changes` that would make the run fit."""
    paragraphs = [
        setting_lines(plan),
        memory_table(plan),
        [
            *time_table(plan),
            speed_line(plan),
            *waiting_lines(plan),
            validation_line(plan, validation_clips),
            whole_run_line(plan, validation_clips, price),
            rates_line(plan),
        ],
        [*checkpoint_table(plan), disk_line(plan), host_line(plan)],
        [*verdict_lines(plan, gpu_bytes, changes), *caveats(plan)],
    ]
    return "\n\n".join("\n".join(lines) for lines in paragraphs)


def setting_lines(plan: Plan) -> list[str]:
    """Model, clip and layout."""
    c = plan.config
    folder = c.pretrained_model_root
    if not Path(folder).is_dir():
        folder += " (no such folder; planned as the full-size model)"
    experts = f"{plan.model.experts} transformers of " if plan.model.experts > 1 else ""
    model = (
        f"{folder}: {experts}{plan.model.parameters / 1e9:.2f} B parameters, "
        f"{plan.trained.total / 1e6:,.0f} M trained"
    )

    text_tokens = plan.tokens - plan.latent_positions - plan.model.image
    image = f" and {plan.model.image} of an image" if plan.model.image else ""
    clip = (
        f"{c.num_frames} frames of {c.height} x {c.width}: {plan.tokens:,} tokens, "
        f"{text_tokens} of them text{image}; {c.num_sampling_steps} denoising steps with "
        f"{plan.branches} forward(s) each, {plan.trained_steps} steps trained"
    )

    prompts = plan.clips // c.num_generations
    layout = (
        f"{plan.gpus} GPU(s): {plan.gpus // c.sp_size} data-parallel x {c.sp_size} "
        f"sequence-parallel, weights in {plan.shards} shard(s); "
        f"{plan.clips} clips of {prompts} prompt(s) per iteration"
    )
    if c.group_trained < c.num_generations:
        layout += f", of which the best and worst {c.group_trained} of each {c.num_generations} are trained"
    return [model, clip, layout]


def memory_table(plan: Plan) -> list[str]:
    """GB of each part that needs memory, and their total, at every moment."""
    parts = {name: list(row.values()) for name, row in memory(plan).items()}
    totals = [sum(column) for column in zip(*parts.values(), strict=True)]
    rows = [["GB per GPU", *(moment.replace("_", " ") for moment in MOMENTS)]]
    for name, sizes in [*parts.items(), ("total", totals)]:
        if any(sizes):
            rows.append([name, *(f"{size / GB:.1f}" for size in sizes)])
    return aligned(rows).splitlines()


def time_table(plan: Plan) -> list[str]:
    seconds = times(plan)
    total = sum(seconds.values())
    rows = [["s per iteration", "", ""]]
    rows += [[name, f"{value:.1f}", f"{value / total:.0%}"] for name, value in seconds.items()]
    rows += [["total", f"{total:.1f}", ""]]
    return aligned(rows).splitlines()


def speed_line(plan: Plan) -> str:
    rate = clips_per_gpu_hour(plan)
    line = (
        f"{rate:.1f} clips per GPU-hour, {PAPER_CLIPS / rate:,.0f} GPU-hours for "
        f"{PAPER_CLIPS:,} clips, as many as in the paper"
    )
    if plan.gpus > 1:
        without_overlap = sum(times(plan, overlap=False).values())
        received = [f"{name} {volume / GB:,.0f}" for name, volume in volumes(plan).items()]
        line += (
            f"; {without_overlap:.1f} s if no communication overlaps; "
            f"GB into each GPU per iteration: {', '.join(received)}"
        )
    return line


def waiting_lines(plan: Plan) -> list[str]:
    """What ranks lose because their windows differ, and the form of `sde_window` that loses nothing."""
    seconds = waiting_time(plan)
    if not seconds:
        return []
    window = plan.config.sde_window
    form = plan.config.window_form
    share = seconds / sum(times(plan).values())
    shared = window.replace(form.kind, f"{form.kind}_iteration", 1)
    return [
        f"{seconds:.1f} s of the rollout, {share:.0%} of an iteration, ranks wait for the one whose "
        f"window costs most; --sde_window {shared} has one window for all ranks and no such wait"
    ]


def validation_line(plan: Plan, clips: int) -> str:
    c = plan.config
    seconds = validation_time(plan, clips)
    if c.validation_interval:
        between = c.validation_interval * sum(times(plan).values())
        share = seconds / (seconds + between)
        when = f"every {c.validation_interval} iterations, {share:.0%} of the time"
    else:
        when = "at the end"
    return f"validation: {seconds / 60:.1f} min {when}; {clips} clips, {validation_sampling(c)}"


def whole_run_line(plan: Plan, validation_clips: int, price: float | None) -> str:
    c = plan.config
    iteration = sum(times(plan).values())
    hours = run_time(plan, validation_clips) / 3600
    gpu_hours = hours * plan.gpus
    cost = f", {gpu_hours * price:,.0f} at {price:g} an hour" if price else ""

    between_saves = (c.save_interval or c.max_steps) * iteration
    if c.save_minutes:
        between_saves = min(between_saves, 60 * c.save_minutes)
    return (
        f"whole run: {c.max_steps} iterations, {c.max_steps * plan.clips:,} clips, "
        f"{hours / 24:.1f} days, {gpu_hours:,.0f} GPU-hours{cost}; "
        f"a checkpoint every {between_saves / 60:.0f} min"
    )


def rates_line(plan: Plan) -> str:
    if plan.rates.gpu_model == MEASURED_ON:
        return "rates: measured on one H200"
    model = plan.rates.gpu_model.upper()
    return f"rates: scaled from an H200 to the {model} by their data sheets, not measured"


def checkpoint_table(plan: Plan) -> list[str]:
    """Size of a checkpoint and of an export, and the seconds to write them."""
    rows = [["", "GB", *(f"s at {speed} GB/s" for speed in DISK_SPEEDS)]]
    sizes = {
        "checkpoint": checkpoint_bytes(plan.config, plan.trained),
        "export": export_bytes(plan),
    }
    for name, size in sizes.items():
        if size:
            seconds = (size / GB / speed for speed in DISK_SPEEDS)
            rows.append([name, f"{size / GB:.1f}", *(f"{value:.3g}" for value in seconds)])
    return aligned(rows).splitlines()


def disk_line(plan: Plan) -> str:
    c = plan.config
    checkpoints = c.keep_checkpoints + 1
    line = (
        f"Disk: {disk_bytes(plan) / GB:.1f} GB for {checkpoints} checkpoints (keep_checkpoints + 1)"
    )
    if not c.use_lora:
        line += f" and {checkpoints if c.export_interval else 1} export(s)"
    return f"{line}."


def host_line(plan: Plan) -> str:
    """Host memory of the fullest node, and what it is for."""
    parts = []
    if plan.config.async_save:
        parts.append(f"{snapshot_bytes(plan) / GB:.1f} for the copy of a checkpoint")
    ranks = min(plan.gpus, plan.rates.gpus_per_node)
    if offloaded_bytes(plan):
        offloaded = ranks * offloaded_bytes(plan)
        parts.append(f"{offloaded / GB:.1f} for the anchor and the weights that it replaces")
    if swapped_bytes(plan):
        swapped = ranks * swapped_bytes(plan)
        parts.append(f"{swapped / GB:.1f} for transformers that take turns on the GPUs")
    uses = f": {', '.join(parts)}" if parts else ""
    return f"Host memory: {host_bytes(plan) / GB:.1f} GB on each node, besides its processes{uses}."


def verdict_lines(plan: Plan, gpu_bytes: float, changes: Sequence[Change]) -> list[str]:
    """Whether the run fits, and what would make it fit."""
    moment, peak_bytes = peak(plan)
    verdict = "fits" if fits(plan, gpu_bytes) else "does NOT fit"
    lines = [
        f"Peak {peak_bytes / GB:.1f} GB ({moment.replace('_', ' ')}) and "
        f"{plan.rates.reserve / GB:.0f} GB in reserve: {verdict} {gpu_bytes / GB:g} GB."
    ]
    if fits(plan, gpu_bytes):
        return lines
    if not changes:
        return [
            *lines,
            f"  No flags and no {MAX_GPUS} GPUs of {gpu_bytes / GB:g} GB make it fit: "
            "use a GPU with more memory, or a smaller model.",
        ]
    lines.append("These together make it fit, with the peak after each:")
    for change in changes:
        _, changed_peak = peak(change.plan)
        lines.append(f"  {change.words}: {changed_peak / GB:.1f} GB; {change.cost}")
    rate = clips_per_gpu_hour(changes[-1].plan)
    lines.append(f"Then {rate:.1f} clips per GPU-hour: {all_words(changes)}")
    return lines


def caveats(plan: Plan) -> list[str]:
    c = plan.config
    lines = []
    unknown_rewards = [
        name for name in c.reward_model if ALIASES.get(name, name) not in plan.rates.rewards
    ]
    if unknown_rewards:
        names = ", ".join(unknown_rewards)
        lines.append(f"Not counted, because its cost is unknown: reward {names}.")
    prompts = c.gradient_accumulation_steps * plan.clips // c.num_generations
    if warning := few_prompts_warning(prompts, c.ema_decay):
        lines.append(f"Note: {warning}.")
    if c.dtype != "bf16":
        lines.append(f"Times are for bf16; {c.dtype} takes several times as long.")
    return lines


def few_prompts_warning(prompts: int, ema_decay: float = 0.0) -> str:
    """A warning about too few prompts per optimizer step; empty if there are enough, or if weights are averaged."""
    if prompts >= FEW_PROMPTS or ema_decay > 0:
        return ""
    return (
        f"{prompts} prompt(s) per update: below {FEW_PROMPTS}, a learning rate tuned for larger "
        "batches is too high (docs/scaling.md): lower it, raise gradient_accumulation_steps, "
        "or average the weights with ema_decay"
    )


def compare(flag: str, plans: dict[str, Plan], gpu_bytes: float) -> str:
    """One line per value of `flag`."""
    rows = [
        [
            flag,
            "tokens",
            "peak GB",
            "fits",
            "s per iteration",
            "no overlap",
            "clips",
            "clips per GPU-hour",
            "GB received",
        ]
    ]
    for value, plan in plans.items():
        _, peak_bytes = peak(plan)
        rows.append(
            [
                value,
                f"{plan.tokens:,}",
                f"{peak_bytes / GB:.1f}",
                "yes" if fits(plan, gpu_bytes) else "no",
                f"{sum(times(plan).values()):.0f}",
                f"{sum(times(plan, overlap=False).values()):.0f}",
                str(plan.clips),
                f"{clips_per_gpu_hour(plan):.1f}",
                f"{sum(volumes(plan).values()) / GB:,.0f}",
            ]
        )
    return aligned(rows)
