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

from sage_grpo.config.command_line import Parser
from sage_grpo.config.fields import FIELDS, default_dtype
from sage_grpo.data.requests import Request, read_requests


def prompts_to_encode(files: Sequence[str] | None, folder: Path) -> list[Request]:
    """Prompts from the files, else those that post_train.py would train on and validate with."""
    from sage_grpo.train.build import prompts_of

    if files is None:
        return prompts_of(None, folder, "train") + prompts_of(None, folder, "valid")
    return [prompt for file in files for prompt in read_requests(file)]


def encoder_size(folder: Path) -> int:
    """Parameters of the text encoders, which are stored in bf16."""
    return sum(file.stat().st_size for file in folder.glob("text_encoder*/**/*.safetensors")) // 2


def encode(args: argparse.Namespace, rank: int, count: int) -> str:
    """Fill the cache; returns a summary of these prompts in it."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    from sage_grpo.models.registry import open_backbone
    from sage_grpo.parallel.device import choose_device
    from sage_grpo.train.build import DTYPES

    disable_progress_bar()  # the one for loading weights
    kind = choose_device(args.device, lambda: encoder_size(args.model_root))
    device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if kind == "cuda" else "cpu")
    dtype = DTYPES[args.dtype or default_dtype(device.type)]
    backbone = open_backbone(args.model_root, device, dtype, args.prompt_cache, complete=False)
    negative = backbone.negative_prompt if args.negative_prompt is None else args.negative_prompt
    named = prompts_to_encode(args.prompts, args.model_root)
    if any(request.image for request in named):
        raise ValueError(
            "prompts with images are encoded by post_train.py, which knows the size of the clips"
        )
    requests = list(dict.fromkeys(request.content for request in (Request(negative), *named)))
    begun = time.perf_counter()
    cache = backbone.embeddings
    missing = sum(request not in cache for request in requests)
    backbone.prepare(requests, rank, count)
    size = sum(cache.path(request).stat().st_size for request in requests)
    seconds = time.perf_counter() - begun
    text = f"{len(requests)} prompts, {missing} of which were missing: {size:,} bytes in {cache.folder}"
    return f"{text}, {seconds:.1f} s on {count} rank(s)"


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("scripts/encode_prompts.py", __doc__)
    add = parser.add_argument
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
        help=".txt, .csv or .jsonl (default: as post_train.py, both kinds)",
    )
    add(
        "--negative_prompt",
        metavar="TEXT",
        help="prompt of the negative branch of guidance (default: the model's)",
    )
    add(
        "--prompt_cache",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="the folder to give post_train.py",
    )
    add(
        "--device",
        choices=FIELDS["device"].metadata["choices"],
        default="auto",
        help="as that of the run",
    )
    kinds = FIELDS["dtype"].metadata
    add("--dtype", choices=kinds["choices"], help=f"as that of the run (default: {kinds['shown']})")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    rank, count = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    try:
        said = encode(parse_arguments(arguments), rank, count)
    except (ValueError, FileNotFoundError) as error:
        print(f"encode_prompts.py: {error}", file=sys.stderr)
        return 2
    if rank == 0:
        print(said)
    return 0


if __name__ == "__main__":
    sys.exit(main())
