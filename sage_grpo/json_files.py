"""JSON files: errors name the file in one sentence, and writes are atomic."""

import json
import math
import os
from collections.abc import Mapping
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


def write_json(path: Path, values: Any) -> None:
    """Replace a file atomically: readers see either the old or the new content."""
    draft = path.with_name(f"{path.name}.tmp")
    draft.write_text(json.dumps(finite(values), indent=1) + "\n")
    os.replace(draft, path)


def finite(value: Any) -> Any:
    """The value with NaN and infinities, which JSON lacks, replaced by None."""
    if isinstance(value, Mapping):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
