"""The page of `nccl.py`, made from its results."""

from collections.abc import Mapping, Sequence
from typing import Any

from research.benchmarks.parts import Results, failure, heading, table, wrapped

PHASES = ("rollout", "decode", "reward", "anchor", "update")
MOMENTS = ("rollout", "decode", "anchor", "update")
NO_MPS = "MPS was not there: the ranks took turns."
TRICK = (
    "All ranks share one GPU: `NCCL_HOSTID` differs for each, so NCCL takes them for different hosts and connects them "
    "by sockets over the loopback; MPS lets their kernels run side by side "
    "(`research/benchmarks/nccl_one_gpu.sh`). Times are those of this setup and say nothing about several GPUs. Host "
    "memory is without mapped files."
)


def page(results: Results) -> str:
    """The results as Markdown."""
    parts = results["parts"]
    lines = [*heading("NCCL with several ranks on one GPU", results["about"]), TRICK, ""]
    if not results.get("mps"):
        lines += [NO_MPS, ""]
    sections = (
        ("The embedded model against one process", "agree", agreement),
        ("Speed of the loopback", "link", speeds),
        ("Full size, 2 ranks", "full2", run_lines),
        ("Full size, 4 ranks", "full4", run_lines),
        ("The recipe for 8 GPUs through run_post_train.sh", "recipe", recipe),
        ("A rank killed in a rollout", "kill", killed),
    )
    for title, name, describe in sections:
        part = parts.get(name)
        lines += [f"## {title}", ""]
        if part is None or "error" in part:
            lines += failure(name, part)
            describe = run_lines
        if part is not None and ("error" not in part or "peaks" in part):
            lines += [*describe(part, parts), ""]
    lines += ["## Models", ""]
    written = parts.get("models", {})
    if "error" in written:
        lines += failure("models", written)
    else:
        lines += [f"- {line}" for line in written.get("lines", ())]
    return wrapped(lines)


def agreement(part: Results, parts: Mapping[str, Any]) -> list[str]:
    """A row per layout: how far its weights and metrics are from those of one process; then what failed."""
    rows = []
    errors = []
    for name, layout in part["layouts"].items():
        if "error" in layout:
            rows.append([name, "failed", *[""] * 6])
            errors += failure(name, layout)
            continue
        keys = ("reward/total", "policy/grad_norm", "kl/anchor")
        differences = [layout["metrics"][key] for key in keys]
        values = (layout["largest"], layout["of_change"], *differences)
        cells = [f"{value:.1e}" for value in values]
        rows.append([name, *cells, f"{layout['equal']:.1%}", f"{layout['ratio']:g}"])
    head = ("layout", "largest weight difference", "of the change", "reward", "gradient norm", "KL", "equal weights",
            "ratio deviation")  # fmt: skip
    precision = "fp32" if part.get("tf32", True) else "fp32, without TF32"
    lines = [
        f"`assets/tiny` in {precision}, three iterations of 16 clips, `configs/tiny_cpu.yaml` with adam_eps "
        "1e-8. Of the change: norm of the difference over that of what training changed. Reward, gradient norm and "
        "KL are the largest relative differences over the iterations.",
        "",
        *table(head, rows),
    ]
    if errors:
        lines += ["", *errors]
    return lines


def speeds(part: Results, parts: Mapping[str, Any]) -> list[str]:
    """GB/s between ranks, by the size of the group."""
    kinds = ("all-gather", "all-to-all")
    head = ("", *(f"{kind}, GB/s into a rank" for kind in kinds))
    rows = [
        [f"groups of {ranks}", *(f"{speed[kind]:.2f}" for kind in kinds)]
        for ranks, speed in part["speeds"].items()
    ]
    return [f"Messages of {part['bytes'] / 1e6:.0f} MB.", "", *table(head, rows)]


def run_lines(part: Results, parts: Mapping[str, Any]) -> list[str]:
    """Times and peaks of one run."""
    rows = []
    for line in part["iterations"]:
        seconds = [f"{line.get(f'time/{phase}') or 0:.1f}" for phase in PHASES]
        deviation = f"{line['policy/ratio_max_deviation']:g}"
        rows.append([line["step"], *seconds, deviation, f"{line['reward/total']:.4g}"])
    head = ("iteration", *(f"{phase}, s" for phase in PHASES), "ratio deviation", "reward")
    traffic = part["planned"]["traffic"]
    sent = ", ".join(f"{name} {size:.1f}" for name, size in traffic.items())
    return [
        f"    {part['command']}",
        "",
        *table(head, rows),
        "",
        f"GB into each rank per iteration, by the planner: {sent}.",
        "",
        *memory_table(part["peaks"], part["planned"]["memory"]),
    ]


def memory_table(peaks: Sequence[Mapping[str, float]], planned: Mapping[str, float]) -> list[str]:
    """Peaks by phase: planned, and measured on every rank; and of host memory."""
    rows = []
    for moment in MOMENTS:
        measured = [rank.get(moment, 0.0) for rank in peaks]
        largest = max(measured, default=0.0)
        difference = f"{planned[moment] / largest - 1:+.0%}" if largest else ""
        cells = [f"{value:.1f}" for value in (planned[moment], *measured)]
        rows.append([moment, *cells, difference])
    rows.append(["host", "", *(f"{rank['host']:.1f}" for rank in peaks), ""])
    ranks = [f"rank {rank}" for rank in range(len(peaks))]
    return table(("peak GB", "planned", *ranks, "planned to largest"), rows)


def recipe(part: Results, parts: Mapping[str, Any]) -> list[str]:
    """The run of the launcher: its checkpoint and saves, times and peaks."""
    saves = ", ".join(f"{seconds:.1f}" for seconds in part["saves"])
    return [
        f"{part['ranks']} ranks, {part['whole']:.0f} s in all. The last checkpoint has {part['checkpoint_gb']:.1f} GB; "
        f"saves kept the run waiting for {saves} s.",
        "",
        *run_lines(part, parts),
    ]


def killed(part: Results, parts: Mapping[str, Any]) -> list[str]:
    """How long the recovery took, and whether the run ended as the unbroken one."""
    after = part["recovery"]
    rows = [
        ("the ranks start again", f"{after['start']:.1f}"),
        ("the next rollout begins", f"{after['rollout']:.1f}"),
        ("the next iteration is done", f"{after['iteration']:.1f}"),
    ]
    return [
        f"Rank {part['killed']} got SIGKILL half a second into the third rollout, with one restart allowed; the "
        "restarted ranks run without MPS, whose server a killed client may break. Seconds from the kill:",
        "",
        *table(("until", "s"), rows),
        "",
        f"The restarted ranks did {part['iterations_after']} of the 3 iterations; {part['whole']:.0f} s in all, "
        f"{parts.get('recipe', {}).get('whole', 0):.0f} s unbroken. {same_result(part, parts.get('recipe', {}))}",
    ]


def same_result(part: Results, unbroken: Results) -> str:
    """How the final weights compare with those of the unbroken run."""
    if "metrics" not in part:
        return f"The result could not be compared: {part['not_compared']}."
    if part["largest"] == 0:
        return "The final weights are bit-equal to those of the unbroken run."
    apart = part["metrics"]
    first_norms = [
        line["policy/grad_norm"]
        for run in (part, unbroken)
        for line in run.get("iterations", ())[:1]
    ]
    before = max(first_norms) / min(first_norms) - 1
    first_not_repeated = part["iterations_after"] < len(part["iterations"])
    already = ""
    if before and first_not_repeated:
        already = f" Before the kill, the first gradient norm differs by {before:.1e} already."
    return (
        f"The final weights differ from those of the unbroken run by at most {part['largest']:.1e}, in norm by "
        f"{part['of_change']:.1e} of what training changed; {part['equal']:.2%} are equal. Rewards differ by "
        f"{apart['reward/total']:.1e}, the gradient norm by {apart['policy/grad_norm']:.1e} (relative).{already}"
    )
