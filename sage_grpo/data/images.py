"""The image that a clip begins with: read and checked with its request, cropped to the size of the clip."""

import hashlib
import io
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image as pil
from PIL import ImageOps

from sage_grpo.files.foreign import Refused, inside, read_bytes
from sage_grpo.files.json_files import printable

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")  # decoders of others may start programs
MAX_PIXELS = 1 << 26
MAX_BYTES = 1 << 29  # of a file, above that of any image of so many pixels
MAX_ASPECT = 16  # a thinner image would grow to gigabytes before it is cropped


@dataclass(frozen=True)
class Image:
    """An image file, equal to others with the same content, and the size of the clip that begins with it."""

    path: Path = field(compare=False)
    digest: str  # SHA-256 of the file
    shape: tuple[int, int]  # height and width of the image
    size: tuple[int, int] | None = None  # height and width of the clip
    picture: pil.Image | None = field(default=None, compare=False)  # if the image is in no file

    def __str__(self) -> str:
        """What determines the pixels that a model sees."""
        return f"{self.digest} {self.size}"

    def cropped(self) -> pil.Image:
        """The image in `size`, resized and cropped around its center as stock pipelines do."""
        from diffusers.image_processor import VaeImageProcessor

        picture = self.picture or open_picture(self.path)
        height, width = self.size or self.shape
        return VaeImageProcessor().resize(picture, height, width, resize_mode="crop")


def read_image(path: Path, where: str, root: Path | None = None) -> Image:
    """Check that an image can be used, by reading all of it.

    where: the line that names it, for errors. root: the folder that it must be in; an image from the command line may
    be anywhere.
    """
    if root is not None:
        _check_inside(path, where, root)
    picture = open_picture(path, f"{where}: ")
    digest = hashlib.sha256(_read(path)).hexdigest()
    return Image(path, digest, shape=(picture.height, picture.width))


def _check_inside(path: Path, where: str, root: Path) -> None:
    """A prompt file may come from others, and may not show their model any picture of this machine."""
    try:
        inside(root, path)
    except (Refused, OSError, RuntimeError) as error:  # a loop of links is one of the latter
        raise ValueError(
            f"{where}: the image {printable(path)} cannot be used: {printable(error)};"
            " an image must be in the folder of its prompt file"
        ) from error


def _read(path: Path) -> bytes:
    """The bytes of a regular file. A link is followed: if that matters, `_check_inside` has seen where it leads."""
    return read_bytes(path.resolve(), MAX_BYTES)


def drawn_image(frame: np.ndarray) -> Image:
    """An image that is in no file, from uint8 pixels (H, W, 3)."""
    height, width, _ = frame.shape
    return Image(
        path=Path("drawn"),
        digest=hashlib.sha256(frame.tobytes()).hexdigest(),
        shape=(height, width),
        size=(height, width),
        picture=pil.fromarray(frame),
    )


def open_picture(path: Path, where: str = "") -> pil.Image:
    """The first frame of a file in RGB, turned upright as its EXIF data say."""
    try:
        with pil.open(io.BytesIO(_read(path)), formats=FORMATS) as file:
            width, height = file.size
            mode = file.mode
            is_small = width * height <= MAX_PIXELS
            is_thin = max(width, height) > MAX_ASPECT * min(width, height)
            is_8_bit = mode[0] not in "IF"
            if is_small and not is_thin and is_8_bit:
                return ImageOps.exif_transpose(file).convert("RGB")
    except Exception as error:  # decoders raise almost anything on a damaged file
        problem = f"cannot be read ({printable(error)})"
        if isinstance(error, FileNotFoundError):
            problem = "does not exist"
        raise ValueError(
            f"{where}the image {printable(path)} {problem}; it must be one of {', '.join(FORMATS)}"
        ) from error
    raise ValueError(
        f"{where}the image {printable(path)} is {width} x {height} in mode {mode}; "
        f"it may have at most {MAX_PIXELS:,} pixels, "
        f"one side at most {MAX_ASPECT} times the other, 8 bits per channel"
    )
