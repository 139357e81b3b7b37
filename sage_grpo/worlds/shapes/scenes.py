"""A video world whose data manifold is known exactly: one colored shape or letter in straight, uniform motion.

A clip is a smooth function of a scene: six discrete attributes named by its caption and four numbers that no caption
mentions (the x and y of the path's center, the exact radius, the exact distance traveled). Size and speed classes are
separated by gaps, so every attribute can be read unambiguously from a clip.

Shapes: B clips, F frames, H rows, W columns. Lengths are fractions of the frame: x and horizontal travel of its width,
y and vertical travel of its height, radius of its shorter side; y points down.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import zip_longest

import torch
from torch import Tensor

from sage_grpo.worlds.shapes.geometry import NAMES, coverage

PALETTE = {
    "red": (0.9, 0.1, 0.1),
    "green": (0.1, 0.9, 0.1),
    "blue": (0.1, 0.1, 0.9),
    "yellow": (0.9, 0.9, 0.1),
    "magenta": (0.9, 0.1, 0.9),
    "cyan": (0.1, 0.9, 0.9),
}
BACKGROUNDS = {"black": (0.04, 0.04, 0.04), "grey": (0.5, 0.5, 0.5), "white": (0.96, 0.96, 0.96)}
RADIUS = {"small": (0.13, 0.16), "large": (0.21, 0.25)}
TRAVEL = {"slow": (0.10, 0.16), "fast": (0.26, 0.34)}
HEADING = {"left": (-1.0, 0.0), "right": (1.0, 0.0), "up": (0.0, -1.0), "down": (0.0, 1.0)}
PAD = 0.02  # keeps the object's soft edge inside the frame as well
MIN_SIDE = 12  # pixels of a frame; below that, letters and sizes are indistinguishable

ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "colour": tuple(PALETTE),
    "shape": NAMES,
    "size": tuple(RADIUS),
    "direction": tuple(HEADING),
    "speed": tuple(TRAVEL),
    "background": tuple(BACKGROUNDS),
}
OPTIONAL = ("size", "speed", "background")  # attributes that a caption may leave out
ALIASES = {"slowly": "slow", "quickly": "fast", "gray": "grey", "big": "large"}
FILLERS = (  # words that name no attribute
    {"a", "an", "the"}
    | {"moving", "moves", "speed"}
    | {"to", "towards", "on", "in", "over", "at", "with", "and"}
)


def vocabulary() -> list[str]:
    """All words that a prompt may use."""
    words = [word for names in ATTRIBUTES.values() for word in names]
    return sorted({*words, *ALIASES, *FILLERS, "letter", "background"})


@dataclass(frozen=True)
class Scenes:
    """The parameters of B clips: class indices into `ATTRIBUTES` (long) and continuous values (float), each (B,)."""

    colour: Tensor
    shape: Tensor
    size: Tensor
    direction: Tensor
    speed: Tensor
    background: Tensor
    x: Tensor
    y: Tensor
    radius: Tensor
    travel: Tensor

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: slice | Tensor) -> "Scenes":
        """A batch of the selected scenes."""
        return Scenes(**{name: value[index] for name, value in self.items()})

    def to(self, device: torch.device) -> "Scenes":
        return Scenes(**{name: value.to(device) for name, value in self.items()})

    def items(self) -> list[tuple[str, Tensor]]:
        """(field name, values) in order."""
        return [(field.name, getattr(self, field.name)) for field in fields(self)]


def table(rows: Mapping[str, Sequence[float]], like: Tensor) -> Tensor:
    """The values of one of the tables above, (classes, numbers), with the device and dtype of `like`."""
    return torch.tensor(list(rows.values()), device=like.device, dtype=like.dtype)


def path_margins(direction: Tensor, radius: Tensor, travel: Tensor) -> Tensor:
    """Minimum distance from the path's center to the frame's sides, (..., 2) for x and y: keeps the object inside."""
    heading = table(HEADING, radius)[direction].abs()
    return radius[..., None] + PAD + heading * travel[..., None] / 2


def sample_scenes(
    n: int, generator: torch.Generator, named: Mapping[str, Tensor] | None = None
) -> Scenes:
    """n scenes drawn uniformly; `named` fixes attributes: name -> (n,) class indices, -1 where free."""
    classes = {
        name: torch.randint(len(words), (n,), generator=generator, device=generator.device)
        for name, words in ATTRIBUTES.items()
    }
    for name, fixed in (named or {}).items():
        fixed = fixed.to(classes[name])
        classes[name] = torch.where(fixed < 0, classes[name], fixed)

    u = torch.rand(4, n, generator=generator, device=generator.device)
    low, high = table(RADIUS, u)[classes["size"]].unbind(-1)
    radius = low + (high - low) * u[0]
    low, high = table(TRAVEL, u)[classes["speed"]].unbind(-1)
    travel = low + (high - low) * u[1]

    # the path stays inside the frame
    margin_x, margin_y = path_margins(classes["direction"], radius, travel).unbind(-1)
    x = margin_x + (1 - 2 * margin_x) * u[2]
    y = margin_y + (1 - 2 * margin_y) * u[3]
    return Scenes(**classes, x=x, y=y, radius=radius, travel=travel)


def scenes_from_prompt(prompts: Sequence[str], generator: torch.Generator) -> Scenes:
    """One random scene per prompt: attributes that the prompt names are fixed, the rest are drawn."""
    parsed = [parse(prompt) for prompt in prompts]
    named = {name: torch.tensor([words.get(name, -1) for words in parsed]) for name in ATTRIBUTES}
    return sample_scenes(len(prompts), generator, named)


def phases(frames: int, like: Tensor) -> Tensor:
    """Position of each frame on the path, (F,): -1/2 at the first frame, +1/2 at the last."""
    if frames < 5 or frames % 4 != 1:
        raise ValueError(
            f"frames is {frames}, but a clip has 4n+1 frames with n >= 1: use 5, 9, 13, ..."
        )
    return torch.linspace(-0.5, 0.5, frames, device=like.device, dtype=like.dtype)


def centers(scenes: Scenes, frames: int, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Column and row of the object's center in pixels, each (B,F)."""
    heading = table(HEADING, scenes.x)[scenes.direction, :, None]
    steps = heading * phases(frames, scenes.x)  # (B,2,F)
    center_x = (scenes.x[:, None] + scenes.travel[:, None] * steps[:, 0]) * width
    center_y = (scenes.y[:, None] + scenes.travel[:, None] * steps[:, 1]) * height
    return center_x, center_y


def unit_coordinates(
    scenes: Scenes, frames: int, height: int, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Pixel centers relative to the object, in radii: u (B,F,1,W), v (B,F,H,1); and the radius in pixels (B,1,1,1)."""
    if min(height, width) < MIN_SIDE:
        raise ValueError(
            f"height x width is {height}x{width}: shapes need at least {MIN_SIDE} pixels each way"
        )
    center_x, center_y = centers(scenes, frames, height, width)
    columns = torch.arange(width, device=scenes.x.device, dtype=scenes.x.dtype) + 0.5
    rows = torch.arange(height, device=scenes.x.device, dtype=scenes.x.dtype) + 0.5
    pixels = (scenes.radius * min(height, width))[:, None, None, None]
    u = (columns - center_x[:, :, None, None]) / pixels
    v = (rows[:, None] - center_y[:, :, None, None]) / pixels
    return u, v, pixels


def object_mask(scenes: Scenes, frames: int, height: int, width: int) -> Tensor:
    """How much of each pixel the object covers, (B,F,H,W) in [0,1]; infinitely smooth in x, y, radius and travel."""
    u, v, pixels = unit_coordinates(scenes, frames, height, width)
    mask = scenes.x.new_empty(len(scenes), frames, height, width)
    for shape in scenes.shape.unique().tolist():
        rows = scenes.shape == shape
        mask[rows] = coverage(shape, u[rows], v[rows], pixels[rows])
    return mask


def render(scenes: Scenes, frames: int, height: int, width: int) -> Tensor:
    """Clips (B,F,H,W,3) in [0,1]: object color over background color, blended by coverage."""
    mask = object_mask(scenes, frames, height, width)[..., None]
    front = table(PALETTE, mask)[scenes.colour, None, None, None]
    back = table(BACKGROUNDS, mask)[scenes.background, None, None, None]
    return back + mask * (front - back)


def captions(
    scenes: Scenes, generator: torch.Generator | None = None, drop: float = 0.3
) -> list[str]:
    """One sentence per scene. With a generator, each of `OPTIONAL` is left out with probability `drop`."""
    is_named = torch.ones(len(scenes), len(OPTIONAL), dtype=torch.bool)
    if generator is not None:
        u = torch.rand(is_named.shape, generator=generator, device=generator.device)
        is_named = u.cpu() >= drop
    sentences = []
    for i in range(len(scenes)):
        words = {name: names[int(getattr(scenes, name)[i])] for name, names in ATTRIBUTES.items()}
        for k, name in enumerate(OPTIONAL):
            if not is_named[i, k]:
                words[name] = ""
        sentences.append(sentence(words))
    return sentences


def sentence(words: Mapping[str, str]) -> str:
    """The caption for a word of each attribute; empty ones are left out."""
    is_letter = len(words["shape"]) == 1
    shape = f'letter "{words["shape"]}"' if is_letter else words["shape"]
    adverb = {"slow": "slowly", "fast": "fast", "": ""}[words["speed"]]
    place = f"on a {words['background']} background" if words["background"] else ""
    parts = [
        "a",
        words["size"],
        words["colour"],
        shape,
        "moving",
        words["direction"],
        adverb,
        place,
    ]
    return " ".join(part for part in parts if part)


def parse(prompt: str) -> dict[str, int]:
    """Attributes named by a prompt, name -> class index; unnamed ones are absent. Letters are in quotes."""
    tokens = re.findall(r'["“][^"”]*["”]|[^\s"“”.,;:!]+', prompt)
    named: dict[str, int] = {}
    for token, following in zip_longest(tokens, tokens[1:], fillvalue=""):
        if _says_nothing(token.lower(), following.lower()):
            continue
        name, index = _look_up(token, following, prompt)
        if named.setdefault(name, index) != index:
            words = ATTRIBUTES[name]
            raise ValueError(
                f"prompt {prompt!r} names two {name}s, "
                f"{words[named[name]]} and {words[index]}: keep one"
            )
    return named


def _says_nothing(word: str, following: str) -> bool:
    """Whether a word names no attribute by itself; "a background" and "letter" lack what they should name."""
    if word == "letter":
        return following[:1] in ('"', "“")
    return word == "background" or (word in FILLERS and following != "background")


def _look_up(token: str, following: str, prompt: str) -> tuple[str, int]:
    """Attribute and class of one word; the word before "background" is the background, quotes enclose a letter."""
    word = ALIASES.get(token.lower(), token.lower())
    if token[0] in '"“':
        word = token[1:-1].strip().upper()
        names = ["shape"]
    elif following.lower() == "background":
        names = ["background"]
    else:
        names = [name for name in ATTRIBUTES if name != "background"]
    for name in names:
        if word in ATTRIBUTES[name]:
            return name, ATTRIBUTES[name].index(word)
    known = "; ".join(f"{name}: {', '.join(words)}" for name, words in ATTRIBUTES.items())
    raise ValueError(
        f"unknown word {token!r} in prompt {prompt!r}. Known words are {known}; "
        'letters are written in double quotes (letter "T") '
        'and a background as "on a black background".'
    )
