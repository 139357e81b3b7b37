"""Files that run code when loaded unsafely."""

import json
import pickle
from pathlib import Path

import torch

from sage_grpo.files import manifest


class Hostile:
    """Runs `touch` when unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


def write_bomb(path, marker):
    """A pickle, or by its suffix a torch file, that makes the file `marker`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix in (".pt", ".pth", ".bin"):
        torch.save({"weight": torch.ones(2), "more": Hostile(marker)}, path)
    else:
        path.write_bytes(pickle.dumps(Hostile(marker)))
    return path


def change(path, **values):
    """Put values into a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def hashes_of(folder, files):
    """Hashes of files by their names in `folder`, as a manifest lists them."""
    return {str(file.relative_to(folder)): manifest.file_sha256(file) for file in files}


def sealed_again(path):
    """A checkpoint as if it had been written with what is in it now: the hashes are right, the content is not."""
    draft = path.rename(path.with_suffix(".tmp"))
    files = [file for file in draft.rglob("*") if file.is_file() and file.name != manifest.NAME]
    manifest.commit(draft, path, hashes_of(draft, files))
