"""Render the images of assets/prompts: flat scenes of our own, small enough for the repository, and their prompt files.

    python scripts/render_images.py [FOLDER]

images.csv has the six scenes. images_train.csv and images_valid.csv have 8 variants of each, in four kinds of light and
mirrored; no image is in both, and the validation file asks for four clips of each image.
"""

import csv
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageOps

from sage_grpo.config.command_line import Parser, answering
from sage_grpo.files.paths import make_folder

FOLDER = Path(__file__).parents[1] / "assets" / "prompts"
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
    draw.ellipse((0.34 * w, 0.79 * h, 0.66 * w, 0.87 * h), fill=(170, 136, 70))
    ball(draw, 0.69 * w, 0.83 * h, 0.035 * w, (170, 136, 70))  # the handle of its holder
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
    mirrored: bool = False


@dataclass(frozen=True)
class Light:
    """Another sky behind a scene, and how a prompt begins with it."""

    words: str
    top: Color
    bottom: Color


@dataclass(frozen=True)
class Variant:
    """A scene in another light, mirrored or not, with its prompt."""

    name: str
    scene: Scene
    prompt: str


SCENES = {
    "boat": Scene(boat, 424, 240, (92, 150, 206), (250, 196, 150)),
    "balloon": Scene(balloon, 240, 424, (110, 180, 236), (222, 238, 246)),
    "lighthouse": Scene(lighthouse, 424, 240, (20, 24, 60), (92, 72, 116)),
    "candle": Scene(candle, 320, 320, (30, 22, 30), (70, 44, 40)),
    "train": Scene(train, 424, 240, (150, 196, 230), (232, 236, 226)),
    "fish": Scene(fish, 424, 240, (60, 160, 190), (16, 60, 110)),
}


LIGHTS = {
    "noon": Light("At noon", (70, 140, 220), (200, 226, 246)),
    "dusk": Light("At dusk", (70, 50, 110), (240, 130, 90)),
    "mist": Light("In pale mist", (170, 176, 182), (216, 218, 216)),
    "night": Light("At night", (10, 14, 40), (50, 60, 100)),
}
# What happens; {ahead} is where the scene looks, {back} the other way.
ACTIONS = {
    "boat": "the sailing boat glides to the {ahead} over calm water, and its sail swells in the wind.",
    "balloon": "the red hot-air balloon rises slowly and drifts to the {ahead} above the green hills.",
    "lighthouse": "the beam of the lighthouse on the {ahead} sweeps over the sea, and waves break on the rocks.",
    "candle": "the flame of the candle leans to the {ahead} in a light draft and rights itself again.",
    "train": "the little train rolls to the {back} in front of the mountains; the camera stays still.",
    "fish": "the orange fish swims to the {back} with quick strokes of its tail, and bubbles rise.",
}
SEEDS = (930, 931, 932, 933)  # of the clips of a validation image


def variants() -> dict[str, Variant]:
    """Every scene in every light, as it is and mirrored."""
    every = {}
    for scene_name, scene in SCENES.items():
        for light_name, light in LIGHTS.items():
            for mirrored in (False, True):
                ahead, back = ("left", "right") if mirrored else ("right", "left")
                name = f"{scene_name}_{light_name}" + ("_mirrored" if mirrored else "")
                prompt = f"{light.words} {ACTIONS[scene_name].format(ahead=ahead, back=back)}"
                changed = replace(scene, top=light.top, bottom=light.bottom, mirrored=mirrored)
                every[name] = Variant(name, changed, prompt)
    return every


def render(name: str) -> Image.Image:
    """A scene or a variant as an image with a palette."""
    scene = SCENES.get(name) or variants()[name].scene
    width = OVERSAMPLING * scene.width
    height = OVERSAMPLING * scene.height
    picture = sky(width, height, scene.top, scene.bottom)
    scene.draw(ImageDraw.Draw(picture), width, height)
    picture = picture.resize((scene.width, scene.height), Image.Resampling.BOX)
    if scene.mirrored:
        picture = ImageOps.mirror(picture)
    return picture.quantize(PALETTE_SIZE, dither=Image.Dither.NONE)


def split(number: int) -> str:
    """Whether the variant with this number is for training or for validation: every third is held out."""
    return "valid" if number % 3 == 0 else "train"


def prompt_rows(kind: str) -> list[list[str | int]]:
    """Rows of images_train.csv or images_valid.csv: prompt, seed, image."""
    seeds = SEEDS if kind == "valid" else SEEDS[:1]
    return [
        [variant.prompt, seed, f"images/{variant.name}.png"]
        for number, variant in enumerate(variants().values())
        for seed in seeds
        if split(number) == kind
    ]


def write_prompts(path: Path, rows: Sequence[Sequence[str | int]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["index", "prompt", "seed", "image"])
        writer.writerows([index, *row] for index, row in enumerate(rows))


@answering("render_images.py: ")
def main(arguments: Sequence[str] | None = None) -> None:
    parser = Parser("scripts/render_images.py", __doc__)
    parser.add_argument(
        "folder", type=Path, nargs="?", metavar="FOLDER", default=FOLDER, help="folder to write to"
    )
    folder = parser.parse_args(arguments).folder
    images = folder / "images"
    make_folder(images, "FOLDER")
    for name in (*SCENES, *variants()):
        render(name).save(images / f"{name}.png", optimize=True)
    for kind in ("train", "valid"):
        write_prompts(folder / f"images_{kind}.csv", prompt_rows(kind))


if __name__ == "__main__":
    main()
