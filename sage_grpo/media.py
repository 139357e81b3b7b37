"""Clips to files that people look at: mp4 and contact sheets. Clips are uint8 (F, H, W, 3)."""

from collections.abc import Sequence
from pathlib import Path

import imageio.v2 as imageio
import numpy as np
from PIL import Image, ImageDraw
from torch import Tensor

GAP, LABEL_HEIGHT, MIN_FRAME = 4, 14, 96  # pixels


def enlarge(clip: Tensor, least: int) -> np.ndarray:
    """(F, H, W, 3) array with whole-number magnification, so that the shorter side has at least `least` pixels."""
    frames = clip.cpu().numpy()
    factor = max(1, -(-least // min(frames.shape[1:3])))
    return frames.repeat(factor, 1).repeat(factor, 2)


def write_mp4(path: Path, clip: Tensor, fps: int) -> None:
    """H.264, near lossless. Tiny clips are magnified: players and the codec's colour blocks need some pixels."""
    with imageio.get_writer(path, fps=fps, codec="libx264", quality=9, macro_block_size=2, format="FFMPEG") as writer:
        for frame in enlarge(clip, 256 if min(clip.shape[1:3]) < 128 else 1):
            writer.append_data(frame)


def contact_sheet(path: Path, clips: Sequence[Tensor], labels: Sequence[str], columns: int = 5) -> None:
    """One row per clip: a label and `columns` evenly spaced frames."""
    rows = []
    for clip in clips:
        frames = enlarge(clip, MIN_FRAME)
        chosen = frames[np.linspace(0, len(frames) - 1, min(columns, len(frames))).round().astype(int)]
        rows.append(np.concatenate([np.pad(f, ((0, 0), (0, GAP), (0, 0)), constant_values=255) for f in chosen], 1))
    width, heights = max(row.shape[1] for row in rows), [row.shape[0] + LABEL_HEIGHT + GAP for row in rows]
    sheet = Image.new("RGB", (width, sum(heights)), "white")
    draw, top = ImageDraw.Draw(sheet), 0
    for row, label, height in zip(rows, labels, heights, strict=True):
        draw.text((2, top + 1), printable(label, width), fill="black")
        sheet.paste(Image.fromarray(row), (0, top + LABEL_HEIGHT))
        top += height
    sheet.save(path)


def printable(label: str, width: int) -> str:
    """One line of what the built-in font can draw, cut to the width in pixels."""
    text = " ".join(label.encode("ascii", "replace").decode().split())
    most = max(8, width // 6)
    return text if len(text) <= most else text[: most - 3] + "..."
