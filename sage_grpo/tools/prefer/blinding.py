"""Clips that do not tell where they come from: numbered at random, without metadata, and padded to equal sizes."""

import random
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

from imageio_ffmpeg import get_ffmpeg_exe
from tqdm import tqdm

from sage_grpo.files.json_files import printable

MIN_BOX = 8  # bytes of an mp4 box: its length and its type


def blind_copies(sources: Sequence[Path], folder: Path, seed: int) -> list[str]:
    """Copy clips into `folder`, which is created, under random numbers; returns their new names in the given order."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = list(range(len(sources)))
    random.Random(seed).shuffle(numbers)
    digits = len(str(len(sources)))
    names = [f"{number:0{digits}d}.mp4" for number in numbers]
    for source, name in zip(tqdm(sources, "clips", unit="clip"), names, strict=True):
        strip(source, folder / name)
    return names


def strip(source: Path, target: Path) -> None:
    """Copy the H.264 stream of an mp4 without re-encoding: no tags, dates or chapters, nothing about the encoder."""
    target.unlink(missing_ok=True)  # nothing is written through a link
    command = [get_ffmpeg_exe(), "-v", "error", "-nostdin", "-n", "-protocol_whitelist", "file"]
    command += ["-f", "mp4", "-i", f"file:{source.resolve()}", "-map", "0:v:0", "-c", "copy"]
    command += ["-map_metadata", "-1", "-map_chapters", "-1"]
    command += ["-fflags", "+bitexact", "-flags:v", "+bitexact", "-movflags", "+faststart"]
    # slices and parameter sets alone: encoders write their settings into others. The second filter rejects other codecs
    command += ["-bsf:v", "filter_units=pass_types=1-5|7-8,h264_metadata"]
    command += ["-f", "mp4", f"file:{target.resolve()}"]
    process = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if process.returncode or not target.is_file():
        target.unlink(missing_ok=True)
        raise ValueError(
            f"{source} cannot be used as an H.264 clip in mp4 ({printable(process.stderr)}); convert all clips "
            "of that system alike, with `ffmpeg -i INPUT -c:v libx264 -crf 8 -pix_fmt yuv420p OUTPUT.mp4`"
        )


def padded(video: bytes, size: int) -> bytes:
    """An mp4 of exactly `size` bytes: the given one and a box `free`, which players skip."""
    missing = size - len(video)
    if missing == 0:
        return video
    if missing < MIN_BOX:
        raise ValueError(f"{missing} bytes are too few for a box")
    return video + struct.pack(">I4s", missing, b"free") + bytes(missing - MIN_BOX)


def equal_size(first: int, second: int) -> int:
    """The size to which two clips of these sizes are padded; both leave room for a box."""
    return max(first, second) + MIN_BOX
