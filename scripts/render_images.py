"""Render the images of assets/prompts/images.csv: flat scenes of our own, small enough for the repository.

python scripts/render_images.py [FOLDER]
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from sage_grpo.config.command_line import Parser, answering
from sage_grpo.files.paths import make_folder

FOLDER = Path(__file__).parents[1] / "assets" / "prompts" / "images"
PALETTE_SIZE = 64
OVERSAMPLING = 3  # an image is drawn this many times larger, then averaged
BANDS = 24  # of the sky

Color = tuple[int, int, int]
Draw = Callable[[ImageDraw.ImageDraw, int, int], None]


def sky(width: int, height: int, top: Color, bottom: Color) -> Image.Image:
    """A picture that fades from one color to another, in bands."""
    band_height = math.ceil(height / BANDS)
    bands = np.linspace(0, 1, BANDS).repeat(band_height)[:height, None, None]
    pixels = (1 - bands) * np.array(top) + bands * np.array(bottom)
    return Image.fromarray(np.broadcast_to(pixels, (height, width, 3)).round().astype(np.uint8))


def ball(draw: ImageDraw.ImageDraw, x: float, y: float, radius: float, color: Color) -> None:
    draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=color)


def boat(draw: ImageDraw.ImageDraw, w: int, h: int) -> None:
    ball(draw, 0.75 * w, 0.3 * h, 0.08 * w, (255, 214, 130))
    draw.rectangle((0, 0.62 * h, w, h), fill=(24, 74, 122))
    draw.polygon(
        [(0.3 * w, 0.66 * h), (0.55 * w, 0.66 * h), (0.5 * w, 0.76 * h), (0.35 * w, 0.76 * h)],
        fill=(120, 44, 30),
    )
    draw.polygon(
        [(0.42 * w, 0.25 * h), (0.42 * w, 0.64 * h), (0.56 * w, 0.64 * h)], fill=(246, 240, 228)
    )


def balloon(draw: ImageDraw.ImageDraw, w: int, h: int) -> None:
    draw.polygon(
        [(0, h), (0, 0.85 * h), (0.3 * w, 0.7 * h), (0.65 * w, 0.86 * h), (w, 0.74 * h), (w, h)],
        fill=(70, 120, 66),
    )
    ball(draw, 0.5 * w, 0.34 * h, 0.22 * w, (204, 52, 48))
    draw.polygon(
        [(0.34 * w, 0.43 * h), (0.66 * w, 0.43 * h), (0.54 * w, 0.58 * h), (0.46 * w, 0.58 * h)],
        fill=(204, 52, 48),
    )
    draw.rectangle((0.45 * w, 0.6 * h, 0.55 * w, 0.66 * h), fill=(110, 74, 40))


def lighthouse(draw: ImageDraw.ImageDraw, w: int, h: int) -> None:
    draw.rectangle((0, 0.72 * h, w, h), fill=(14, 30, 56))
    draw.polygon(
        [(0.5 * w, 0.78 * h), (0.62 * w, 0.6 * h), (w, 0.62 * h), (w, 0.84 * h)], fill=(46, 42, 44)
    )
    draw.polygon(
        [(0.7 * w, 0.64 * h), (0.72 * w, 0.24 * h), (0.78 * w, 0.24 * h), (0.8 * w, 0.64 * h)],
        fill=(226, 226, 220),
    )
    draw.polygon([(0.72 * w, 0.19 * h), (0, 0.08 * h), (0, 0.3 * h)], fill=(120, 116, 96))
    draw.rectangle((0.715 * w, 0.16 * h, 0.785 * w, 0.24 * h), fill=(255, 226, 120))


def candle(draw: ImageDraw.ImageDraw, w: int, h: int) -> None:
    draw.rectangle((0, 0.8 * h, w, h), fill=(74, 46, 28))
    draw.rectangle((0.43 * w, 0.45 * h, 0.57 * w, 0.82 * h), fill=(238, 226, 200))
    draw.line((0.5 * w, 0.45 * h, 0.5 * w, 0.4 * h), fill=(20, 20, 20), width=w // 90)
    draw.polygon(
        [(0.5 * w, 0.24 * h), (0.55 * w, 0.36 * h), (0.5 * w, 0.42 * h), (0.45 * w, 0.36 * h)],
        fill=(255, 176, 46),
    )


def train(draw: ImageDraw.ImageDraw, w: int, h: int) -> None:
    draw.polygon([(0, 0.7 * h), (0.2 * w, 0.35 * h), (0.42 * w, 0.7 * h)], fill=(116, 122, 140))
    draw.polygon(
        [(0.3 * w, 0.7 * h), (0.62 * w, 0.25 * h), (0.95 * w, 0.7 * h)], fill=(98, 104, 124)
    )
    draw.rectangle((0, 0.7 * h, w, h), fill=(180, 160, 96))
    for x, color in ((0.08, (38, 92, 62)), (0.3, (170, 40, 40)), (0.52, (170, 40, 40))):
        draw.rectangle((x * w, 0.62 * h, (x + 0.2) * w, 0.78 * h), fill=color)
        ball(draw, (x + 0.05) * w, 0.79 * h, 0.02 * w, (24, 24, 24))
        ball(draw, (x + 0.15) * w, 0.79 * h, 0.02 * w, (24, 24, 24))


def fish(draw: ImageDraw.ImageDraw, w: int, h: int) -> None:
    draw.rectangle((0, 0.9 * h, w, h), fill=(196, 178, 120))
    draw.ellipse((0.3 * w, 0.38 * h, 0.66 * w, 0.62 * h), fill=(250, 140, 40))
    draw.polygon(
        [(0.64 * w, 0.5 * h), (0.78 * w, 0.38 * h), (0.78 * w, 0.62 * h)], fill=(250, 140, 40)
    )
    ball(draw, 0.38 * w, 0.47 * h, 0.02 * w, (10, 10, 10))
    for x, y in ((0.22, 0.3), (0.25, 0.2), (0.21, 0.1)):
        ball(draw, x * w, y * h, 0.015 * w, (220, 240, 250))


@dataclass(frozen=True)
class Scene:
    """What is drawn on a sky."""

    draw: Draw
    width: int
    height: int
    top: Color  # of the sky
    bottom: Color


SCENES = {
    "boat": Scene(boat, 424, 240, (92, 150, 206), (250, 196, 150)),
    "balloon": Scene(balloon, 240, 424, (110, 180, 236), (222, 238, 246)),
    "lighthouse": Scene(lighthouse, 424, 240, (20, 24, 60), (92, 72, 116)),
    "candle": Scene(candle, 320, 320, (30, 22, 30), (70, 44, 40)),
    "train": Scene(train, 424, 240, (150, 196, 230), (232, 236, 226)),
    "fish": Scene(fish, 424, 240, (60, 160, 190), (16, 60, 110)),
}


def render(name: str) -> Image.Image:
    """A scene as an image with a palette."""
    scene = SCENES[name]
    width = OVERSAMPLING * scene.width
    height = OVERSAMPLING * scene.height
    picture = sky(width, height, scene.top, scene.bottom)
    scene.draw(ImageDraw.Draw(picture), width, height)
    picture = picture.resize((scene.width, scene.height), Image.Resampling.BOX)
    return picture.quantize(PALETTE_SIZE, dither=Image.Dither.NONE)


@answering("render_images.py: ")
def main(arguments: Sequence[str] | None = None) -> None:
    parser = Parser("scripts/render_images.py", __doc__)
    parser.add_argument(
        "folder", type=Path, nargs="?", metavar="FOLDER", default=FOLDER, help="folder to write to"
    )
    folder = parser.parse_args(arguments).folder
    make_folder(folder, "FOLDER")
    for name in SCENES:
        render(name).save(folder / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()
