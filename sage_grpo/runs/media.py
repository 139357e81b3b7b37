"""Writes clips as files for viewing: mp4 and contact sheets. Clips are uint8 (F, H, W, 3)."""

from collections.abc import Sequence
from pathlib import Path

import imageio.v2 as imageio
import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from sage_grpo.json_files import naming

GAP, LABEL_HEIGHT = 4, 14  # pixels
FRAME = (96, 320)  # pixels: minimum shorter side and maximum longer side of a thumbnail
COLUMNS = 5


def enlarge(clip: Tensor, least: int) -> np.ndarray:
    """(F, H, W, 3) array, magnified by an integer so that the shorter side has at least `least` pixels."""
    frames = clip.cpu().numpy()
    factor = max(1, -(-least // min(frames.shape[1:3])))
    return frames.repeat(factor, 1).repeat(factor, 2)


def write_mp4(path: Path, clip: Tensor, fps: int) -> None:
    """Write near-lossless H.264. Tiny clips are magnified: players and chroma subsampling need some pixels."""
    with imageio.get_writer(path, fps=fps, codec="libx264", quality=9, macro_block_size=2, format="FFMPEG") as writer:
        for frame in enlarge(clip, 256 if min(clip.shape[1:3]) < 128 else 1):
            writer.append_data(frame)
    if not path.is_file() or not path.stat().st_size:  # ffmpeg fails silently
        path.unlink(missing_ok=True)
        raise OSError(f"{path} could not be written; is the disk full?")


def read_mp4(path: Path) -> tuple[Tensor, float]:
    """Read a clip (F, H, W, 3) and its frames per second."""
    with naming(path), imageio.get_reader(path, format="FFMPEG") as reader:
        return torch.from_numpy(np.stack(list(reader.iter_data()))), float(reader.get_meta_data()["fps"])


def thumbnails(clip: Tensor, columns: int = COLUMNS) -> np.ndarray:
    """Evenly spaced frames (columns, h, w, 3), magnified or shrunk to fit a sheet."""
    chosen = clip[torch.linspace(0, len(clip) - 1, min(columns, len(clip))).round().long()]
    frames = enlarge(chosen, FRAME[0])
    factor = min(1.0, FRAME[1] / max(frames.shape[1:3]))
    size = (round(frames.shape[2] * factor), round(frames.shape[1] * factor))
    return np.stack([np.asarray(Image.fromarray(frame).resize(size)) for frame in frames])


def contact_sheet(path: Path, rows: Sequence[np.ndarray], labels: Sequence[str]) -> None:
    """Write one row of `thumbnails` per clip, under its label."""
    width = max(len(row) * (row.shape[2] + GAP) for row in rows)
    heights = [row.shape[1] + LABEL_HEIGHT + GAP for row in rows]
    sheet = Image.new("RGB", (width, sum(heights)), "white")
    draw, top = ImageDraw.Draw(sheet), 0
    for row, label, height in zip(rows, labels, heights, strict=True):
        draw.text((2, top + 1), printable(label, width), fill="black")
        for number, frame in enumerate(row):
            sheet.paste(Image.fromarray(frame), (number * (frame.shape[1] + GAP), top + LABEL_HEIGHT))
        top += height
    try:
        sheet.save(path)
    except OSError:  # a partial image would pass for a complete one
        path.unlink(missing_ok=True)
        raise


def printable(label: str, width: int) -> str:
    """One line of text that the built-in font can draw, cut to the width in pixels."""
    text = " ".join(label.encode("ascii", "replace").decode().split())
    most = max(8, width // 6)
    return text if len(text) <= most else text[: most - 3] + "..."
