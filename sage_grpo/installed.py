"""Checks that the packages of requirements.txt are installed: a sentence instead of a failed import."""

import sys
from importlib.util import find_spec
from pathlib import Path

from sage_grpo.exit_codes import WRONG_INPUT

ROOT = Path(__file__).parents[1]
# import names; packages that few programs need are checked by those programs
PACKAGES = (
    "torch",
    "diffusers",
    "transformers",
    "peft",
    "numpy",
    "einops",
    "safetensors",
    "imageio",
    "PIL",
    "tqdm",
    "yaml",
    "matplotlib",
    "jinja2",
)
NAMED = 3  # missing packages that the message names


def require_packages(*needed: str) -> None:
    """Exit with a sentence if one of these packages, by default of all, is missing.

    Usually the virtual environment was not activated, so the sentence names all that are missing.
    """
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if not set(missing) & set(needed or PACKAGES):
        return
    remedy = "run `make venv` first, then `source .venv/bin/activate`"
    if (ROOT / ".venv").is_dir():
        remedy = f"run `source {ROOT / '.venv' / 'bin' / 'activate'}` first"
    names = ", ".join(missing[:NAMED])
    if len(missing) > NAMED:
        names += f" and {len(missing) - NAMED} more packages"
    print(
        f"{sys.executable} lacks {names}, which this program needs; {remedy}, "
        f"or install {ROOT / 'requirements.txt'}",
        file=sys.stderr,
    )
    sys.exit(WRONG_INPUT)
