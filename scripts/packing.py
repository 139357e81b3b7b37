"""What a machine that keeps nothing hands on to the next: results and unfinished runs, in one tar file.

results/NAME.json                          finished runs
runs/NAME/run.json, metrics.jsonl, ...     unfinished ones: their newest checkpoint and what it cannot bring back
"""

import os
import shutil
import tarfile
import tempfile
from collections.abc import Collection, Iterable
from pathlib import Path, PurePosixPath

from sage_grpo.config import ConfigError
from sage_grpo.train import checkpoint
from scripts import results

KEPT = ("run.json", "status.json", "metrics.jsonl")


def pack(file: Path, folder: Path, work: Path, names: Iterable[str], mib: float) -> list[str]:
    """Write all results of `folder` and those of the named run folders that still fit, in this order.

    Returns the names of begun runs that did not fit into `mib` MiB: they will begin anew.
    """
    members = {f"results/{path.name}": path for path in sorted(folder.glob("*.json"))}
    left_out = []
    for name in names:
        more = {f"runs/{name}/{path.relative_to(work / name)}": path for path in _lasting(work / name)}
        if _size(members | more) <= mib * 2**20:
            members |= more
        elif more:
            left_out.append(name)
    draft = file.with_name(f"{file.name}.tmp")
    with tarfile.open(draft, "w") as tar:
        for name, path in members.items():
            tar.add(path, arcname=name, recursive=False, filter=_anonymous)
    os.replace(draft, file)
    return left_out


def _lasting(run: Path) -> list[Path]:
    """The files of a run folder that it needs to go on; none where it has no checkpoint yet."""
    checkpoints = checkpoint.found(run / "checkpoints")
    if not checkpoints:
        return []
    newest = sorted(path for path in checkpoints[-1].rglob("*") if path.is_file())
    return [*(run / name for name in KEPT if (run / name).is_file()), *newest]


def _size(members: dict[str, Path]) -> int:
    """Of the tar file: blocks of 512 bytes, a head for each file, and the end, filled up to 10 KiB."""
    blocks = sum(2 + path.stat().st_size // 512 for path in members.values())
    return 512 * blocks + 2 * tarfile.RECORDSIZE


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


def extract(tar: tarfile.TarFile, folder: Path) -> None:
    """Its files into `folder`, and nowhere else; Python before 3.11.4 cannot promise that."""
    for entry in tar:
        name = PurePosixPath(entry.name)
        if name.is_absolute() or ".." in name.parts or not (entry.isreg() or entry.isdir()):
            raise tarfile.TarError(f"it holds {entry.name!r}, which is no file below its folder")
        if source := tar.extractfile(entry):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            with source, (folder / name).open("wb") as target:
                shutil.copyfileobj(source, target)


def unpack(file: Path, folder: Path, work: Path, known: Collection[str]) -> None:
    """Put results and runs in their places; what is there already, and for runs has come as far, stays."""
    if not file.is_file():
        raise ConfigError(f"--unpack {file} does not exist; name a file that --pack wrote")
    for place in (folder, work):
        place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=work) as temporary:
        try:
            with tarfile.open(file, "r:") as tar:
                extract(tar, Path(temporary))
        except tarfile.TarError as error:
            raise ConfigError(f"--unpack {file} cannot be read as a file that --pack wrote: {error}") from error
        found = [*Path(temporary).glob("results/*.json"), *Path(temporary).glob("runs/*")]
        for path in found:
            name = path.stem if path.suffix == ".json" else path.name
            if name not in known:
                raise ConfigError(f"--unpack {file} holds {name}, which is no run of the studies; remove it from there")
        for path in found:
            _place(path, folder, work)


def _place(path: Path, folder: Path, work: Path) -> None:
    if path.suffix == ".json":
        results.read(path)  # refuses what was edited
        if not (folder / path.name).exists():
            shutil.move(path, folder / path.name)
    elif _reached(work / path.name) < _reached(path):
        shutil.rmtree(work / path.name, ignore_errors=True)
        shutil.move(path, work / path.name)


def _reached(run: Path) -> int:
    """The iteration of the newest checkpoint, -1 where there is none."""
    return max(map(checkpoint.step_of, checkpoint.found(run / "checkpoints")), default=-1)
