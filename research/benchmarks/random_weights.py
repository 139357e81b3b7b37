"""Write random weights in the layout of safetensors, for models of full size that are needed only for their speed."""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sage_grpo.files.tensor_files import NAMES
from sage_grpo.models.weights import INDEX, index_text, plan_files

WRITERS = 6  # threads; each holds one file of weights
FILE_BYTES = 2e9

Draw = Callable[[str, Sequence[int]], Tensor]  # a tensor, from its name and shape


class Writer:
    """Draws weights on a device and writes them, several files at a time."""

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
        self.device = device
        self.dtype = dtype
        self.pool = ThreadPoolExecutor(WRITERS)
        self.files: list[Future[None]] = []

    def model(self, folder: Path, model: nn.Module, config: str) -> int:
        """Begin to write the config and weights of one part; returns the number of parameters."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(config)
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        sizes = {name: math.prod(shape) * self.dtype.itemsize for name, shape in shapes.items()}
        plan = plan_files(sizes, FILE_BYTES)
        files = plan.filename_to_tensors
        if len(files) > 1:
            (folder / INDEX).write_text(index_text(plan.tensor_to_filename, sum(sizes.values())))
        for file, names in files.items():
            self.file(folder / file, {name: shapes[name] for name in names})
        return sum(parameter.numel() for parameter in model.parameters())

    def file(self, path: Path, shapes: Mapping[str, Sequence[int]]) -> None:
        """Begin to write one file; each has a seed of its own."""
        draw = random_tensor(self.device, self.dtype, seed=len(self.files))
        self.files.append(self.pool.submit(write_file, path, shapes, self.dtype, draw))

    def finish(self) -> None:
        """Wait for all files."""
        for file in self.files:
            file.result()


def random_tensor(device: torch.device, dtype: torch.dtype, seed: int) -> Draw:
    """A function that draws small values, and ones for normalization scales."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(name: str, shape: Sequence[int]) -> Tensor:
        tensor = torch.empty(tuple(shape), device=device, dtype=dtype)
        if re.search(r"(norm|ln_)\w*\.(weight|gamma)$", name):
            return tensor.fill_(1)
        return tensor.normal_(0, 0.02, generator=generator)

    return draw


def write_file(
    path: Path, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype, draw: Draw
) -> None:
    """Write a safetensors file, one tensor at a time. Plain writes of torch's memory: nothing is hashed."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin = end
        end += math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)

    # one place for all tensors, whose pages a GPU can write to directly
    largest = max(math.prod(shape) for shape in shapes.values())
    host = torch.empty(largest, dtype=dtype, pin_memory=torch.cuda.is_available())
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            values = host[: math.prod(shape)]
            values.copy_(draw(name, shape).reshape(-1))
            file.write(memoryview(values.view(torch.uint8).numpy()))
