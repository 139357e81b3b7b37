"""The image that a clip begins with: read and checked with its request, cropped to the size of the clip."""

import hashlib
import io
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image as pil
from PIL import ImageOps

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")  # others may start programs
MOST_PIXELS, MOST_ASPECT = 1 << 26, 16  # a thin image would grow to gigabytes before it is cropped


@dataclass(frozen=True)
class Image:
    """An image file, equal to others with the same content, and the size of the clip that begins with it."""

    path: Path = field(compare=False)
    digest: str  # sha256 of the file
    shape: tuple[int, int]  # height and width
    size: tuple[int, int] | None = None  # height and width of the clip
    picture: pil.Image | None = field(default=None, compare=False)  # of an image that is in no file

    def __str__(self) -> str:
        """What determines the pixels that a model sees."""
        return f"{self.digest} {self.size}"

    def cropped(self) -> pil.Image:
        """The image in `size`, resized and cropped around its center as stock pipelines do."""
        from diffusers.image_processor import VaeImageProcessor

        picture = self.picture or open_picture(self.path)
        return VaeImageProcessor().resize(picture, *(self.size or self.shape), resize_mode="crop")


def read_image(path: Path, where: str) -> Image:
    """Check that an image can be used, by reading all of it."""
    picture = open_picture(path, f"{where}: ")
    return Image(
        path, hashlib.sha256(path.read_bytes()).hexdigest(), (picture.height, picture.width)
    )


def drawn_image(frame: np.ndarray) -> Image:
    """An image that is in no file, of uint8 (H, W, 3)."""
    shape, digest = frame.shape[:2], hashlib.sha256(frame.tobytes()).hexdigest()
    return Image(Path("drawn"), digest, shape, shape, pil.fromarray(frame))


def open_picture(path: Path, where: str = "") -> pil.Image:
    """The first frame of a file in RGB, turned upright as its EXIF data say."""
    try:
        with pil.open(io.BytesIO(path.read_bytes()), formats=FORMATS) as file:
            (width, height), mode = file.size, file.mode
            fits = width * height <= MOST_PIXELS and max(file.size) <= MOST_ASPECT * min(file.size)
            if fits and mode[0] not in "IF":
                return ImageOps.exif_transpose(file).convert("RGB")
    except Exception as error:  # decoders raise almost anything on a damaged file
        text = (
            "does not exist"
            if isinstance(error, FileNotFoundError)
            else f"cannot be read ({error})"
        )
        raise ValueError(
            f"{where}the image {path} {text}; it must be one of {', '.join(FORMATS)}"
        ) from error
    limits = f"at most {MOST_PIXELS:,} pixels, one side at most {MOST_ASPECT} times the other, 8 bits per channel"
    raise ValueError(
        f"{where}the image {path} is {width} x {height} in mode {mode}; it may have {limits}"
    )
