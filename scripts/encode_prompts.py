"""Encode prompts ahead of a run, so that post_train.py with the same --prompt_cache loads no text encoder.

    python scripts/encode_prompts.py --model_root FOLDER --prompt_cache CACHE
    torchrun --nproc_per_node 8 scripts/encode_prompts.py ...          (the ranks share the prompts)

Cached prompts are skipped, so an interrupted run continues where it stopped. Encoders with other weights or another
precision get a separate folder in the cache.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from sage_grpo.config.command_line import Parser, answering
from sage_grpo.config.fields import default_dtype, flag_info
from sage_grpo.data.requests import Request, read_requests
from sage_grpo.exit_codes import DONE
from sage_grpo.files.paths import check_folder


@answering("encode_prompts.py: ")
def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_arguments(arguments)
    check_folder(args.prompt_cache, "prompt_cache")
    rank = int(os.environ.get("RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    summary = encode(args, rank, world_size)
    if rank == 0:
        print(summary)
    return DONE


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("scripts/encode_prompts.py", __doc__)
    add = parser.add_argument
    device = flag_info("device")
    dtype = flag_info("dtype")
    add(
        "--model_root",
        type=Path,
        metavar="FOLDER",
        default=Path("assets/tiny"),
        help="model folder",
    )
    add(
        "--prompts",
        nargs="+",
        metavar="FILE",
        help="prompt files: .txt, .csv or .jsonl (default: the model's, for training and validation)",
    )
    add(
        "--negative_prompt",
        metavar="TEXT",
        help="negative prompt for guidance (default: the model's)",
    )
    add(
        "--prompt_cache",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="cache folder, the same that post_train.py is given",
    )
    add(
        "--device",
        choices=device.choices,
        default="auto",
        help="device of the encoders",
    )
    add(
        "--dtype",
        choices=dtype.choices,
        help=f"precision of the encoders, the same as in the run (default: {dtype.default_text})",
    )
    return parser.parse_args(arguments)


def encode(args: argparse.Namespace, rank: int, world_size: int) -> str:
    """Fill the cache with this rank's share of the prompts; returns a summary of all prompts."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    from sage_grpo.models.registry import open_backbone
    from sage_grpo.parallel.device import choose_device
    from sage_grpo.train.build import DTYPES

    disable_progress_bar()  # that of loading weights
    device_type = choose_device(args.device, lambda: encoder_size(args.model_root))
    device = torch.device(device_type)
    if device_type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    dtype = DTYPES[args.dtype or default_dtype(device_type)]
    backbone = open_backbone(args.model_root, device, dtype, args.prompt_cache, complete=False)

    prompts = prompts_to_encode(args.prompts, args.model_root)
    if any(request.image for request in prompts):
        raise ValueError(
            "prompts with images are encoded by post_train.py, which knows the size of the clips"
        )
    negative = backbone.negative_prompt if args.negative_prompt is None else args.negative_prompt
    unique = list(dict.fromkeys(request.content for request in (Request(negative), *prompts)))

    start = time.perf_counter()
    cache = backbone.embeddings
    missing = sum(request not in cache for request in unique)
    backbone.prepare(unique, rank, world_size)
    size = sum(cache.path(request).stat().st_size for request in unique)
    seconds = time.perf_counter() - start
    return (
        f"{len(unique)} prompts, {missing} of which were missing: {size:,} bytes in {cache.folder}, "
        f"{seconds:.1f} s on {world_size} rank(s)"
    )


def prompts_to_encode(files: Sequence[str] | None, folder: Path) -> list[Request]:
    """Prompts from the files, else those that post_train.py would train on and validate with."""
    from sage_grpo.train.inputs import requests_from

    if files is None:
        return requests_from(None, folder, "train") + requests_from(None, folder, "valid")
    return [prompt for file in files for prompt in read_requests(file)]


def encoder_size(folder: Path) -> int:
    """Parameters of the text encoders, which are stored in bf16: two bytes each."""
    files = folder.glob("text_encoder*/**/*.safetensors")
    return sum(file.stat().st_size for file in files) // 2


if __name__ == "__main__":
    sys.exit(main())
