"""JSON files that others wrote, read so that whatever is wrong with one is a sentence that names it."""

import json
from pathlib import Path
from typing import Any


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{path} is missing; download that folder again") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}); download it again") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} is not a JSON object; download it again")
    return values
