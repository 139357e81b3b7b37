"""Clips as viewable files: mp4 and contact sheets. A clip is uint8 (F, H, W, 3)."""

import subprocess
from collections.abc import Sequence
from contextlib import suppress
from fractions import Fraction
from pathlib import Path

import imageio.v2 as imageio
import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from sage_grpo.files.foreign import new_name
from sage_grpo.files.json_files import naming, printable

LOSSLESS = 5  # x264's constant rate factor: nearly lossless
COLUMNS = 5  # frames of a clip on a contact sheet

# pixels
MIN_SIDE = 96  # least shorter side of a thumbnail
MAX_SIDE = 320  # greatest longer side of a thumbnail
MIN_VIDEO = 256  # least shorter side of a magnified video
GAP = 6
MARGIN = 14
LABEL_HEIGHT = 20
FONT_SIZE = 13


def write_mp4(path: Path, clip: Tensor, fps: float, crf: int = LOSSLESS) -> None:
    """Write H.264, near-lossless by default; a file of that name is replaced once the new one is complete.

    Tiny clips are magnified: players and chroma subsampling need some pixels.
    crf: x264's constant rate factor, larger for smaller files.
    """
    from imageio_ffmpeg import get_ffmpeg_exe  # not needed by runs without videos

    if clip.dtype != torch.uint8 or clip.shape[3:] != (3,) or not len(clip):
        raise ValueError(f"{path}: a clip is uint8 (F, H, W, 3), not {clip.dtype} {(*clip.shape,)}")
    is_tiny = min(clip.shape[1:3]) < 128
    frames = np.ascontiguousarray(magnified(clip, MIN_VIDEO if is_tiny else 1))
    height, width = frames.shape[1:3]
    command = [get_ffmpeg_exe(), "-v", "error", "-nostdin", "-y"]
    command += ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}"]
    command += ["-r", str(Fraction(fps).limit_denominator()), "-i", "pipe:"]
    command += ["-c:v", "libx264", "-crf", str(crf), "-pix_fmt", "yuv420p"]
    if height % 2 or width % 2:  # chroma needs even sides
        command += ["-vf", f"scale={width + width % 2}:{height + height % 2}"]

    draft = new_name(path)
    try:
        # In a process group of its own, so that Ctrl-C, which stops a run in an orderly way, does not cut a video off.
        # A preexec_fn, as in imageio, would make Python fork this process with all of its memory.
        ended = subprocess.run(
            [*command, "-f", "mp4", f"file:{draft}"],
            input=memoryview(frames).cast("B"),
            capture_output=True,
            process_group=0,
            check=False,
        )
        if ended.returncode:
            said = ended.stderr.decode(errors="replace").strip() or f"exit code {ended.returncode}"
            raise OSError(f"{path} could not be written by ffmpeg: {printable(said)}")
        draft.replace(path)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise


def read_mp4(path: Path) -> tuple[Tensor, float]:
    """Read a clip (F, H, W, 3) and its frames per second."""
    with naming(path), imageio.get_reader(path, format="FFMPEG") as reader:
        frames = np.stack(list(reader.iter_data()))
        fps = float(reader.get_meta_data()["fps"])
    return torch.from_numpy(frames), fps


def reduced(clip: Tensor, height: int, width: int) -> Tensor:
    """A clip (F, H, W, 3) from a file in the size in which it was sampled: `write_mp4` magnifies tiny ones.

    height, width: that size, 0 if unknown. A clip that is not a whole multiple of it is returned as it is.
    """
    rows, columns = clip.shape[1:3]
    is_magnified = height > 0 and width > 0 and rows > height and rows % height == 0
    if not is_magnified or columns * height != rows * width:
        return clip
    blocks = clip.float().unflatten(2, (width, -1)).unflatten(1, (height, -1))
    return blocks.mean((2, 4)).round().to(torch.uint8)  # (F, height, width, 3)


def magnified(clip: Tensor, least: int) -> np.ndarray:
    """(F, H, W, 3) array, magnified by an integer so that the shorter side has at least `least` pixels."""
    frames = clip.cpu().numpy()
    shorter_side = min(frames.shape[1:3])
    factor = max(1, -(-least // shorter_side))
    return frames.repeat(factor, 1).repeat(factor, 2)


def thumbnails(clip: Tensor, columns: int = COLUMNS) -> np.ndarray:
    """Evenly spaced frames (columns, h, w, 3), magnified or shrunk to fit a sheet."""
    indices = torch.linspace(0, len(clip) - 1, min(columns, len(clip))).round().long()
    frames = magnified(clip[indices], MIN_SIDE)
    height, width = frames.shape[1:3]
    factor = min(1.0, MAX_SIDE / max(height, width))
    size = (round(width * factor), round(height * factor))
    return np.stack([np.asarray(Image.fromarray(frame).resize(size)) for frame in frames])


def contact_sheet(path: Path, rows: Sequence[np.ndarray], labels: Sequence[str]) -> None:
    """Write one row of `thumbnails` per clip, under its label."""
    from matplotlib import get_data_path  # slow to import, and a run may write no sheet

    font = ImageFont.truetype(f"{get_data_path()}/fonts/ttf/DejaVuSans.ttf", FONT_SIZE)
    width = max(len(row) * (row.shape[2] + GAP) for row in rows) - GAP
    height = sum(row.shape[1] + LABEL_HEIGHT + MARGIN for row in rows)
    sheet = Image.new("RGB", (width + 2 * MARGIN, height + MARGIN), "white")
    draw = ImageDraw.Draw(sheet)

    top = MARGIN
    for row, label in zip(rows, labels, strict=True):
        draw.text((MARGIN, top), fitted(label, font, width), "#1f2933", font)
        for number, frame in enumerate(row):
            left = MARGIN + number * (frame.shape[1] + GAP)
            sheet.paste(Image.fromarray(frame), (left, top + LABEL_HEIGHT))
        top += row.shape[1] + LABEL_HEIGHT + MARGIN

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
