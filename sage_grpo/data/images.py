"""The image that a clip begins with: read and checked with its request, cropped to the size of the clip."""

import hashlib
import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")  # others may start programs
MOST_PIXELS, MOST_ASPECT = 1 << 26, 16  # of an image; a thin one would grow to gigabytes before it is cropped


@dataclass(frozen=True)
class Image:
    """An image file by its content, and the size (height, width) of the clip that begins with it."""

    path: Path = field(compare=False)
    digest: str  # sha256 of the file
    shape: tuple[int, int]  # its own height and width
    size: tuple[int, int] | None = None

    def __str__(self) -> str:
        """What determines the pixels that a model sees."""
        return f"{self.digest} {self.size}"

    def cropped(self) -> "Picture":
        """The image in `size`, resized and cropped around its center as stock pipelines do."""
        from diffusers.image_processor import VaeImageProcessor

        return VaeImageProcessor().resize(open_picture(self.path), *(self.size or self.shape), resize_mode="crop")


def read_image(path: Path, where: str) -> Image:
    """Check that an image can be used, by reading all of it."""
    picture = open_picture(path, f"{where}: ")
    return Image(path, hashlib.sha256(path.read_bytes()).hexdigest(), (picture.height, picture.width))


def open_picture(path: Path, where: str = "") -> "Picture":
    """The first frame of a file in RGB, turned upright as its EXIF data say."""
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(path.read_bytes()), formats=FORMATS) as file:
            shape, mode = (file.height, file.width), file.mode
            usable = (
                shape[0] * shape[1] <= MOST_PIXELS and max(shape) <= MOST_ASPECT * min(shape) and mode[0] not in "IF"
            )
            picture = ImageOps.exif_transpose(file).convert("RGB") if usable else None
    except Exception as error:  # decoders raise almost anything on a damaged file
        text = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read ({error})"
        raise ValueError(f"{where}the image {path} {text}; it must be one of {', '.join(FORMATS)}") from error
    if picture is None:
        limits = f"at most {MOST_PIXELS:,} pixels, one side at most {MOST_ASPECT} times the other, 8 bits per channel"
        raise ValueError(f"{where}the image {path} is {shape[1]} x {shape[0]} in mode {mode}; it may have {limits}")
    return picture
