"""How far does exploration noise push a rollout off the data manifold? Measures it with exact velocity fields.

    python -m research.studies.sde_study --output outputs/sde_study        (under a minute on 2 cores)

Every sampler runs on two analytic worlds, a mixture of tight Gaussians and a thickened ring, in four arms:
    all                    noise in every step
    last_ode               the last step deterministic: nothing after it could remove its noise
    equal_energy           eta solved per sampler so that all inject the same sum of std^2
    equal_energy_last_ode  both
Writes table.json (one row per world, arm, sampler, eta, T, shift), summary.md (what survives all arms) and three plots.
"""

import argparse
import itertools
import json
import math
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from pathlib import Path

import matplotlib
import torch
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

from research.studies.analytic import (
    AnalyticWorld,
    Mixture,
    Ring,
    marginal,
    off_manifold,
    sample_data,
    velocity,
)
from sage_grpo.algo.equalizer import equalizer, gradient_scale
from sage_grpo.algo.sde import (
    SDES,
    Schedule,
    build_schedule,
    flow_sigmas,
    flow_variance,
    sage_variance,
)
from sage_grpo.tools.figure_style import SAMPLERS, STYLE

ETAS = (0.1, 0.3, 0.5, 0.7, 1.0)
STEPS = (10, 20, 40)
SHIFTS = (1.0, 5.0, 9.0)
ENERGIES = (0.5, 1.0, 1.5, 2.0, 4.0)
ARMS = ("all", "last_ode", "equal_energy", "equal_energy_last_ode")
NOISY = tuple(name for name in SDES if name != "ode")
GROUPS = 1024
GENERATIONS = 2  # rollouts of a group, which share their initial noise
REFERENCE = {"T": 20, "shift": 5.0}
X_LABELS = {
    "energy": "injected energy, sum of std$^2$",
    "exploration": "exploration: on-manifold spread in a group",
}


def mixture(dim: int = 16, modes: int = 8, width: float = 0.05, seed: int = 0) -> Mixture:
    generator = torch.Generator().manual_seed(seed)
    return Mixture(torch.randn(modes, dim, generator=generator), width)


def worlds() -> dict[str, AnalyticWorld]:
    return {"mixture": mixture(), "ring": Ring(dim=16, radius=4.0, width=0.05)}


@cache
def draws(dim: int, steps: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Initial states (N, D), one noise per group, and per-step noise (T, N, D), shared by all samplers."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(GROUPS, dim, generator=generator).repeat_interleave(GENERATIONS, 0)
    return start, torch.randn(steps, *start.shape, generator=generator)


def rollout(world: AnalyticWorld, schedule: Schedule) -> Iterator[Tensor]:
    """States (N, D) after each step."""
    x, noise = draws(world.dim, schedule.num_steps)
    for i in range(schedule.num_steps):
        x, _ = schedule.step(i, x, velocity(world, x, schedule.sigmas[i].item()), noise[i])
        yield x


def moment_error(world: AnalyticWorld, x: Tensor, sigma: float) -> tuple[float, float]:
    """RMS error of the mean and relative error of the variance of the state at noise level sigma."""
    mean, var = marginal(world, sigma)
    gap = x - mean
    mean_error = gap.mean(0).square().mean().sqrt().item()
    return mean_error, gap.square().mean().item() / var - 1


def finished(world: AnalyticWorld, x: Tensor) -> dict[str, float | None]:
    """Quality and diversity of finished samples (groups * generations, D)."""
    distance = off_manifold(world, x)
    group_distance = distance.unflatten(0, (-1, GENERATIONS)).mean(1)
    on_manifold = world.nearest(x)
    total_variation = None  # of the weights of the modes
    if isinstance(world, Mixture):
        share = torch.bincount(world.nearest_mode(x), minlength=len(world.modes)) / len(x)
        total_variation = (share - 1 / len(share)).abs().sum().item() / 2
    return {
        "off_manifold": distance.mean().item(),
        "off_manifold_se": group_distance.std().item() / math.sqrt(GROUPS),
        "spread": (x - on_manifold).square().mean().sqrt().item(),
        "mode_weight_tv": total_variation,
        "diversity": group_spread(x),
        "exploration": group_spread(on_manifold),
    }


def group_spread(points: Tensor) -> float:
    """RMS distance, per sqrt(D), between two rollouts that started from the same noise."""
    return points.unflatten(0, (-1, GENERATIONS)).var(1).mean().mul(2).sqrt().item()


def energy(schedule: Schedule) -> float:
    """Noise that a rollout adds: the sum of std^2 over its steps."""
    return schedule.std.double().square().sum().item()


@cache
def eta_for_energy(
    sde_type: str, steps: int, shift: float, noisy_steps: range, target: float
) -> float | None:
    """The eta at which the sampler injects energy `target`, by bisection; None if no eta does."""

    def injected(eta: float) -> float:
        return energy(build_schedule(sde_type, flow_sigmas(steps, shift), eta).window(noisy_steps))

    low = 1e-3
    high = 1.0 if sde_type == "cps" else 8.0
    if not injected(low) <= target <= injected(high):
        return None
    for _ in range(30):
        middle = (low + high) / 2
        if injected(middle) < target:
            low = middle
        else:
            high = middle
    return high


def cells() -> Iterator[dict]:
    """Every (world, arm, sampler, eta, T, shift) of the study; `setting` is the requested eta or energy."""
    for world, steps, shift in itertools.product(worlds(), STEPS, SHIFTS):
        base = {"world": world, "T": steps, "shift": shift}
        yield base | {"arm": "all", "sde_type": "ode", "setting": None, "eta": 0.0}
        for arm, sde_type in itertools.product(ARMS, NOISY):
            noisy_steps = range(steps - 1 if arm.endswith("last_ode") else steps)
            for setting in ENERGIES if arm.startswith("equal") else ETAS:
                eta = setting
                if arm.startswith("equal"):
                    eta = eta_for_energy(sde_type, steps, shift, noisy_steps, setting)
                yield base | {"arm": arm, "sde_type": sde_type, "setting": setting, "eta": eta}


def measure(cell: dict) -> dict:
    """The row of a cell: its settings, energy, quality and diversity, and the moment errors by step."""
    world = worlds()[cell["world"]]
    schedule = build_schedule(cell["sde_type"], flow_sigmas(cell["T"], cell["shift"]), cell["eta"])
    if cell["arm"].endswith("last_ode"):
        schedule = schedule.window(range(cell["T"] - 1))
    mean_errors = []
    var_errors = []
    for sigma, x in zip(schedule.sigmas[1:].tolist(), rollout(world, schedule), strict=True):
        mean_error, var_error = moment_error(world, x, sigma)
        mean_errors.append(round(mean_error, 5))
        var_errors.append(round(var_error, 5))
    errors = {"mean_error": mean_errors, "var_error": var_errors}
    return cell | {"energy": energy(schedule)} | finished(world, x) | errors


def truth() -> dict[str, dict]:
    """Values of `finished` for samples of the data: the targets, and the error of the moments."""
    data = {}
    for name, world in worlds().items():
        x = sample_data(world, GROUPS * GENERATIONS, torch.Generator().manual_seed(1))
        mean_error, var_error = moment_error(world, x, 0.0)
        data[name] = finished(world, x) | {"mean_error": mean_error, "var_error": var_error}
    return data


def select(rows: list[dict], **where: object) -> list[dict]:
    """The rows with these values."""
    return [row for row in rows if all(row[key] == value for key, value in where.items())]


def claims(rows: list[dict], data: dict) -> str:
    """Number of grid cells in which the paper's order of samplers by distance holds beyond sampling error (2 SE)."""
    pairs = (("sage_grpo", "flow_grpo"), ("flow_grpo", "dance_grpo"), ("sage_grpo", "dance_grpo"))
    head = " | ".join(f"{near} nearer than {far}" for near, far in pairs)
    lines = [f"| world | arm | {head} |", "|" + "---|" * 5]
    for world, arm in itertools.product(data, ARMS):
        arm_rows = select(rows, world=world, arm=arm)
        cells = " | ".join(compare(arm_rows, near, far) for near, far in pairs)
        lines.append(f"| {world} | {arm} | {cells} |")
    return "\n".join(lines) + "\n"


def compare(rows: list[dict], near: str, far: str) -> str:
    """In how many cells sampler `near` is nearer to the manifold than `far` beyond sampling error, and farther."""
    by_key = {(row["sde_type"], row["T"], row["shift"], row["setting"]): row for row in rows}
    cells = 0
    nearer = 0
    farther = 0
    for (name, *key), row in by_key.items():
        other = by_key.get((far, *key))
        if name != near or other is None:
            continue
        gap = other["off_manifold"] - row["off_manifold"]
        margin = 2 * math.hypot(row["off_manifold_se"], other["off_manifold_se"])
        cells += 1
        if gap > margin:
            nearer += 1
        elif gap < -margin:
            farther += 1
    return f"{nearer} of {cells}, farther in {farther}"


def reference(rows: list[dict], data: dict, etas: tuple[float, ...] = (0.5, 1.0)) -> str:
    """Effect of each sampler on the distribution in the reference cell: mixture, T = 20, shift 5."""
    true = data["mixture"]
    lines = [
        "| arm | eta | sampler | off-manifold | spread | mode weights off by | variance error, worst step | energy |"
        " exploration |",
        "|" + "---|" * 9,
        f"| | | true data | {true['off_manifold']:.3f} | {true['spread']:.3f} | {true['mode_weight_tv']:.3f} |"
        f" {true['var_error']:+.2f} | | {true['exploration']:.2f} |",
    ]
    for row in select(rows, world="mixture", **REFERENCE):
        shown_eta = row["eta"] in etas or row["sde_type"] == "ode"
        if row["arm"] not in ("all", "last_ode") or not shown_eta:
            continue
        worst = max(row["var_error"], key=abs)
        lines.append(
            f"| {row['arm']} | {row['eta']} | {row['sde_type']} | {row['off_manifold']:.3f} | {row['spread']:.3f} |"
            f" {row['mode_weight_tv']:.3f} | {worst:+.2f} | {row['energy']:.2f} | {row['exploration']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def plot_std(axes: list, eta: float = 0.5) -> None:
    """Figure 9: std per step of sage and flow in the paper's three regimes."""
    sigmas = flow_sigmas(REFERENCE["T"], REFERENCE["shift"])
    sigma, sigma_next = sigmas[:-1], sigmas[1:]
    second = sigmas[1].item()
    regimes = {
        "(a) both held at the second sigma:\nsage's first step has no noise left": (second, second),
        "(b) both held at 0.997:\nflow's first step nearly doubles": (0.997, 0.997),
        "(c) each as it ships:\nsage below flow from the second step on": (0.997, second),
    }
    for ax, (title, (sage_ceiling, flow_ceiling)) in zip(axes, regimes.items(), strict=True):
        flow = flow_variance(sigma, sigma_next, eta, flow_ceiling)
        sage = sage_variance(sigma, sigma_next, eta, sage_ceiling)
        for name, variance in {"sage_grpo": sage, "flow_grpo": flow}.items():
            ax.plot(variance.sqrt(), "o-", ms=3, color=SAMPLERS[name], label=name)
        ax.set(
            title=title, xlabel="denoising step", ylabel=f"noise std (eta {eta})", ylim=(0, None)
        )
        ax.legend(title="sde_type")


def plot_front(axes: list, rows: list[dict], data: dict) -> None:
    """Off-manifold distance against exploration, or against energy if the samplers share it."""
    titles = (
        "noise in every step",
        "last step deterministic",
        "equal injected energy",
        "equal energy, last step quiet",
    )
    for ax, arm, title in zip(axes, ARMS, titles, strict=True):
        x_key = "energy" if arm.startswith("equal") else "exploration"
        for name in NOISY:
            line = select(rows, world="mixture", arm=arm, sde_type=name, **REFERENCE)
            x = [row[x_key] for row in line]
            y = [row["off_manifold"] for row in line]
            ax.plot(x, y, "o-", ms=4, color=SAMPLERS[name], label=name)
        true = data["mixture"]["off_manifold"]
        ax.axhline(true, ls="--", color="grey", lw=1)
        style = {"color": "grey", "fontsize": 8, "ha": "right"}
        ax.text(0.98, true * 0.7, "true data", transform=ax.get_yaxis_transform(), **style)
        ax.set(title=title, xlabel=X_LABELS[x_key], yscale="log")
    axes[0].set_ylabel("distance to the manifold")
    axes[0].legend(title="sde_type", fontsize=8)


def plot_gradients(axes: list, eta: float = 0.5) -> None:
    """Figure 4: norm of d log_prob / d v per step, predicted and by autograd, without and with the equalizer."""
    world = mixture()
    noise = torch.randn(512, world.dim, generator=torch.Generator().manual_seed(0))
    for name in NOISY:
        schedule = build_schedule(name, flow_sigmas(REFERENCE["T"], REFERENCE["shift"]), eta)
        noisy = schedule.stochastic
        sigma = schedule.sigmas[:-1][noisy]
        predicted = gradient_scale(schedule)
        measured = torch.tensor(
            [_gradient_norm(world, schedule, i, noise) for i in range(schedule.num_steps)]
        )
        factors = (torch.ones(schedule.num_steps), equalizer(schedule))
        color = SAMPLERS[name]
        for ax, factor in zip(axes, factors, strict=True):
            ax.plot(sigma, (factor * predicted)[noisy], color=color, lw=1, label=name)
            ax.plot(sigma, (factor * measured)[noisy], "o", ms=3, color=color)
    for ax, title in zip(axes, ("without the equalizer", "with the equalizer"), strict=True):
        ax.set(title=title, xlabel="noise level sigma of the step", yscale="log", ylim=(0.01, 10))
    axes[0].set_ylabel("norm of d log_prob / d v")
    axes[0].legend(fontsize=8, title="sde_type: lines |b|/std, dots autograd")


def _gradient_norm(world: AnalyticWorld, schedule: Schedule, i: int, noise: Tensor) -> float:
    """Mean norm of d log_prob / d v over samples, in units of its expected value for |b|/std = 1."""
    x = noise.flip(0)
    v = velocity(world, x, schedule.sigmas[i].item()).requires_grad_()
    x_next, _ = schedule.step(i, x, v.detach(), noise)
    (gradient,) = torch.autograd.grad(schedule.log_prob(i, x, v, x_next).sum(), v)
    return (gradient.norm(dim=1).mean() / (noise.norm(dim=1).mean() / world.dim)).item()


def draw(rows: list[dict], data: dict, output: Path) -> list[Path]:
    """Write the three plots; returns their paths."""
    jobs = {  # name -> columns, plot function
        "std_per_step": (3, plot_std),
        "front": (4, partial(plot_front, rows=rows, data=data)),
        "gradient_scale": (2, plot_gradients),
    }
    paths = []
    for name, (columns, plot) in jobs.items():
        path = output / f"{name}.png"
        with matplotlib.rc_context(fname=STYLE):
            figure = Figure(figsize=(4.2 * columns, 3.6), layout="constrained")
            plot(list(figure.subplots(1, columns, sharey=name != "std_per_step")))
            figure.savefig(path, dpi=110)
        paths.append(path)
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("outputs/sde_study"))
    output = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # the tensors are small: one process per core is faster
    todo = list(cells())
    data = truth()
    reachable = [cell for cell in todo if cell["eta"] is not None]
    unreachable = [cell for cell in todo if cell["eta"] is None]
    one_thread = {"initializer": torch.set_num_threads, "initargs": (1,)}
    with ProcessPoolExecutor(os.cpu_count(), **one_thread) as pool:
        measured = pool.map(measure, reachable, chunksize=8)
        rows = list(tqdm(measured, "sde study", len(reachable), unit="cell"))
    result = {"data": data, "rows": rows, "unreachable": unreachable}
    (output / "table.json").write_text(json.dumps(result, separators=(",", ":")))
    summary = reference(rows, data) + "\n" + claims(rows, data)
    (output / "summary.md").write_text(summary)
    print(summary)
    for path in (output / "table.json", output / "summary.md", *draw(rows, data, output)):
        print("wrote", path)


if __name__ == "__main__":
    main()
