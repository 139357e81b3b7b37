"""Requests with images that are noise, for comparisons with stock diffusers."""

import torch
from PIL import Image

from sage_grpo.data.images import read_image
from sage_grpo.data.requests import Request


def requests_with_images(folder, text, height, width):
    """The prompt with one image and with another, both of the size of the clip."""
    requests = []
    for number in range(2):
        generator = torch.Generator().manual_seed(number)
        pixels = torch.randint(0, 256, (height, width, 3), generator=generator)
        path = folder / f"{number}.png"
        Image.fromarray(pixels.byte().numpy()).save(path)
        requests.append(Request(text, image=read_image(path, "test")).sized(height, width))
    return requests
