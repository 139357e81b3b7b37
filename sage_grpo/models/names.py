"""Tables of tensor names: how the layout that a model was published in, or another program reads, maps to diffusers'.

A table is a text file. Each line has a name of the other layout, the name in diffusers and, where tensors are stacked
there, the blocks of rows that make up the diffusers tensor, in this order: 1,0/2 are the second and the first of two
equal blocks. `#` stands for a number. What follows a name, such as .weight, is kept.
"""

import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from sage_grpo.models.weights import Rows


class NameRule(NamedTuple):
    """Maps a tensor of another layout, split into `num_blocks` equal blocks of rows, to a diffusers tensor.

    `blocks` are those that the diffusers tensor consists of, in order.
    """

    original: str
    diffusers: str
    blocks: tuple[int, ...] = (0,)
    num_blocks: int = 1


def read_rules(path: Path) -> dict[str, list[NameRule]]:
    """The rules of a table, by the part of the model whose heading, such as [vae], they follow."""
    rules: dict[str, list[NameRule]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("# "):
            continue
        if line.startswith("["):
            part = line[1:-1]
            rules[part] = []
            continue
        original, diffusers, *stacked = line.split()
        rule = NameRule(original, diffusers)
        if stacked:
            blocks, _, num_blocks = stacked[0].partition("/")
            rule = NameRule(
                original, diffusers, tuple(int(n) for n in blocks.split(",")), int(num_blocks)
            )
        rules[part].append(rule)
    return rules


def translate(name: str, pattern: str, template: str) -> str | None:
    """`name` with the beginning that `pattern` matches replaced by `template`; None if it does not match.

    Each `#` matches a number, which takes the place of the `#` at the same position in the template.
    """
    match = _beginning(pattern).match(name)
    if not match:
        return None
    numbers = iter(match.groups())
    return re.sub("#", lambda _: next(numbers), template) + name[match.end() :]


@cache
def _beginning(pattern: str) -> re.Pattern[str]:
    """Matches the names that begin with `pattern`."""
    return re.compile(re.escape(pattern).replace(r"\#", r"(\d+)") + r"(?=\.|$)")


def find(rules: Sequence[NameRule], name: str) -> tuple[NameRule, str] | None:
    """The rule of a diffusers name, and the name in the other layout; None without a rule."""
    matches = []
    for rule in rules:
        original = translate(name, rule.diffusers, rule.original)
        if original is not None:
            matches.append((rule, original))
    if not matches:
        return None
    [match] = matches  # tables are unambiguous
    return match


def to_original(
    rules: Sequence[NameRule], names: Iterable[str], layout: str
) -> dict[str, tuple[Rows, ...]]:
    """The rows of diffusers tensors that make up each tensor of another layout, which errors call `layout`.

    Names without a rule, and tensors that would have gaps, are rejected.
    """
    blocks: dict[str, list[Rows | None]] = {}  # of each tensor of the other layout
    for name in names:
        match = find(rules, name)
        if match is None:
            raise ValueError(f"the tensor {name} has no place in {layout}")
        rule, original = match
        tensor_blocks = blocks.setdefault(original, [None] * rule.num_blocks)
        for position, block in enumerate(rule.blocks):
            tensor_blocks[block] = Rows(name, position, len(rule.blocks))

    complete: dict[str, tuple[Rows, ...]] = {}
    for original, tensor_blocks in blocks.items():
        present = tuple(rows for rows in tensor_blocks if rows is not None)
        missing = len(tensor_blocks) - len(present)
        if missing:
            raise ValueError(
                f"{original} of {layout} cannot be put together: {missing} parts are missing"
            )
        complete[original] = present
    return complete
