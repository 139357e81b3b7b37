"""Clips, prompts and reference numbers from the published VideoAlign code."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

FOLDER = Path(__file__).parents[1] / "fixtures" / "videoalign"


@pytest.fixture(scope="session")
def samples():
    """One namespace per clip: what samples.json says, and the clip itself."""
    with np.load(FOLDER / "frames.npz") as frames:
        return [
            SimpleNamespace(**sample, clip=torch.from_numpy(frames[sample["name"]]))
            for sample in json.loads((FOLDER / "samples.json").read_text())
        ]


@pytest.fixture(scope="session")
def upstream():
    """Inner values of the published code for the five clips in one batch."""
    with np.load(FOLDER / "upstream_inputs.npz") as values:
        return {name: torch.from_numpy(values[name]) for name in values}
