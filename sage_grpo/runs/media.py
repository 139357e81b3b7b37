"""Writes clips as files for viewing: mp4 and contact sheets. Clips are uint8 (F, H, W, 3)."""

from collections.abc import Sequence
from pathlib import Path

import imageio.v2 as imageio
import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from sage_grpo.json_files import naming, printable

GAP, MARGIN, LABEL_HEIGHT, FONT_SIZE = 6, 14, 20, 13  # pixels
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
    from matplotlib import get_data_path  # for its font; a run needs it only where sheets are written

    font = ImageFont.truetype(f"{get_data_path()}/fonts/ttf/DejaVuSans.ttf", FONT_SIZE)
    width = max(len(row) * (row.shape[2] + GAP) for row in rows) - GAP
    heights = [row.shape[1] + LABEL_HEIGHT + MARGIN for row in rows]
    sheet = Image.new("RGB", (width + 2 * MARGIN, sum(heights) + MARGIN), "white")
    draw, top = ImageDraw.Draw(sheet), MARGIN
    for row, label, height in zip(rows, labels, heights, strict=True):
        draw.text((MARGIN, top), fitted(label, font, width), "#1f2933", font)
        for number, frame in enumerate(row):
            sheet.paste(Image.fromarray(frame), (MARGIN + number * (frame.shape[1] + GAP), top + LABEL_HEIGHT))
        top += height
    try:
        sheet.save(path)
    except OSError:  # a partial image would pass for a complete one
        path.unlink(missing_ok=True)
        raise


def fitted(label: str, font: ImageFont.FreeTypeFont, width: int) -> str:
    """One printable line of text, cut to the width in pixels."""
    text = printable(label)
    while len(text) > 1 and font.getlength(text) > width:
        text = f"{text[:-2]}…"
    return text
