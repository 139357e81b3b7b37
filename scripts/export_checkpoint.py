"""Export a run's checkpoint as a transformer folder, for sampling with other software.

    python scripts/export_checkpoint.py --checkpoint RUN/checkpoints/step-000100 --output FOLDER --layout diffusers

layout diffusers   FOLDER replaces transformer/ in a diffusers model folder
       tencent     FOLDER replaces transformer/480p_t2v, or the matching version, in Tencent's layout
       lora        FOLDER holds the adapter in diffusers format
For the first two, an adapter is merged into the model it was trained on. A run of all weights needs this only for
checkpoints without a transformer/ folder, which `export_interval` adds. If the run averaged its weights, the averaged
ones are exported. Every file of the checkpoint is first verified by its hash; FOLDER appears once it is complete.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sage_grpo.config.command_line import Parser, answer_early


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("scripts/export_checkpoint.py", __doc__)
    add = parser.add_argument
    add("--checkpoint", type=Path, metavar="FOLDER", required=True, help="RUN/checkpoints/step-N")
    add("--output", type=Path, metavar="FOLDER", required=True, help="folder to make")
    add("--layout", choices=("diffusers", "tencent", "lora"), default="diffusers", help="as above")
    add(
        "--model_path",
        type=Path,
        metavar="FOLDER",
        help="model of the run (default: where the run had it)",
    )
    return parser.parse_args(arguments)


answer_early(__name__, parse_arguments)

import torch
from safetensors.torch import save_file
from torch import Tensor

from sage_grpo.files import foreign, manifest
from sage_grpo.models.hunyuan15.folder import ModelFolder
from sage_grpo.models.hunyuan15.tencent import RULES, SETTINGS, diffusers_config, translate
from sage_grpo.models.hunyuan15.transformer import PackedTransformer
from sage_grpo.models.lora import LORA_FILE, read_adapter
from sage_grpo.models.registry import open_backbone
from sage_grpo.models.shards import trained_weights
from sage_grpo.models.versions import DEFAULT_VERSION
from sage_grpo.models.weights import (
    INDEX,
    STEM,
    Rows,
    Weights,
    check_names,
    index_text,
    open_folder,
)

NAMED = ("target_size", "task_type")  # encoded in the folder name in Tencent's layout


def full_config(config: dict[str, Any]) -> str:
    """config.json of diffusers with every setting."""
    with torch.device("meta"):
        return PackedTransformer.from_config(config).to_json_string()


def write_diffusers(checkpoint: Path, folder: Path, model_path: Path | None) -> None:
    """Write a checkpoint's transformer. Adapters and shards change `model_path`, by default the run's model."""
    if (checkpoint / "transformer").is_dir():
        if model_path is not None:
            raise ValueError(
                f"--model_path is for adapters and shards; {checkpoint} has transformer/: leave it out"
            )
        # the manifest was checked, but nothing may lead elsewhere even if the checkpoint changes meanwhile
        shutil.copytree(
            checkpoint / "transformer", folder, symlinks=True, copy_function=foreign.copy_regular
        )
        return
    run = json.loads((checkpoint / "trainer" / "state.json").read_text())["config"]
    root = model_path or Path(run["pretrained_model_root"])
    version = run["pretrained_transformer_version"] if ModelFolder(root).is_tencent else None
    base, adapter = open_backbone(root, version=version, complete=False), checkpoint / LORA_FILE
    weights = base.open_weights()
    save_weights(
        folder, merged(weights, adapter) if adapter.is_file() else trained(checkpoint, weights)
    )
    (folder / "config.json").write_text(base.empty_transformer().to_json_string())


def trained(checkpoint: Path, base: Weights) -> Iterator[tuple[str, Tensor]]:
    """Transformer tensors, one at a time, from the ranks' shards; the model gives what was never trained."""
    weights = trained_weights(checkpoint, lambda: base)
    check_names(weights, {name: base.shape(name) for name in base.names})
    return ((name, weights.read(name)) for name in weights.names)


def merged(weights: Weights, file: Path) -> Iterator[tuple[str, Tensor]]:
    """Transformer tensors, one at a time, with a saved adapter's `alpha / r * B A` added; dtypes are kept."""
    adapter, config = read_adapter(file)
    if not config or config["use_rslora"]:
        raise ValueError(
            f"{file} does not tell one rank and one scale for all layers; merge it by other means"
        )
    downs = {name.replace(".lora_A.", "."): name for name in adapter if ".lora_A." in name}
    for name, down in downs.items():
        shape = (len(adapter[down.replace(".lora_A.", ".lora_B.")]), adapter[down].shape[1])
        if name not in weights.names or weights.shape(name) != shape:
            raise ValueError(
                f"{file} does not fit '{weights.where}': {name} of shape {shape} is not there"
            )
    for name in weights.names:
        value = weights.read(name)
        if name in downs:
            down, up = adapter[downs[name]], adapter[downs[name].replace(".lora_A.", ".lora_B.")]
            change = config["lora_alpha"] / config["r"] * (up.double() @ down.double())
            value = (value.double() + change).to(value.dtype)
        yield name, value


def write_tencent(diffusers: Path, folder: Path) -> None:
    """Write the transformer in Tencent's layout; rejects settings that its config.json cannot express."""
    ours = json.loads((diffusers / "config.json").read_text())
    theirs = tencent_transformer_config(ours)
    told = json.loads(full_config(diffusers_config("transformer", theirs, DEFAULT_VERSION)))
    lost = [name for name in told if name not in NAMED and told[name] != ours[name]]
    if lost:
        raise ValueError(
            f"Tencent's config.json cannot tell that {lost[0]} is {ours[lost[0]]}; use --layout diffusers"
        )
    save_tencent(folder, "transformer", open_folder(diffusers))
    (folder / "config.json").write_text(json.dumps(theirs, indent=2) + "\n")


def to_tencent(part: str, names: Iterable[str]) -> dict[str, tuple[Rows, ...]]:
    """The inverse of `to_diffusers`: the diffusers rows that make up each Tencent tensor.

    Names that are not in the tables are rejected.
    """
    blocks: dict[str, list[Rows | None]] = {}
    for name in names:
        known = [
            (rule, new)
            for rule in RULES[part]
            if (new := translate(name, rule.diffusers, rule.tencent))
        ]
        if not known:
            raise ValueError(f"the {part} tensor {name} has no place in Tencent's layout")
        [(rule, new)] = known
        found = blocks.setdefault(new, [None] * rule.num_blocks)
        for position, block in enumerate(rule.blocks):
            found[block] = Rows(name, position, len(rule.blocks))
    for new, found in blocks.items():
        if None in found:
            raise ValueError(
                f"{new} of Tencent's layout cannot be put together: {found.count(None)} parts are missing"
            )
    return {new: tuple(rows for rows in found if rows) for new, found in blocks.items()}


def tencent_transformer_config(config: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `diffusers_config`, from all arguments.

    Size and task are in the folder name; refiner layers and norm cannot be expressed.
    """
    patch = [config["patch_size_t"], config["patch_size"], config["patch_size"]]
    width = config["num_attention_heads"] * config["attention_head_dim"]
    own = {
        "in_channels": (config["in_channels"] - 1) // 2,
        "concat_condition": True,
        "mm_single_blocks_depth": 0,
    }
    renamed = {theirs: config[ours] for theirs, ours in SETTINGS["transformer"].items()}
    return renamed | own | {"hidden_size": width, "patch_size": patch}


def save_weights(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], max_shard_bytes: float = 5e9
) -> None:
    """Write files with diffusers' names. If `tensors` is a generator, only one shard at a time is in memory."""
    folder.mkdir(parents=True, exist_ok=True)
    if old := sorted(folder.glob(f"{STEM}*.safetensors*")):
        raise ValueError(f"'{folder}' already holds {old[0].name}; write to another folder.")
    drafts, total = [], 0
    for group in grouped(tensors, max_shard_bytes):
        drafts.append((folder / f"{STEM}-{len(drafts) + 1:05d}.tmp", list(group)))
        total += sum(tensor.nbytes for tensor in group.values())
        shard = {name: tensor.detach().cpu().contiguous() for name, tensor in group.items()}
        save_file(shard, drafts[-1][0], metadata={"format": "pt"})
        del group, shard  # before filling the next one
    files = {}
    for number, (draft, names) in enumerate(drafts, 1):
        place = f"-{number:05d}-of-{len(drafts):05d}" if len(drafts) > 1 else ""
        draft.rename(folder / f"{STEM}{place}.safetensors")
        files |= dict.fromkeys(names, f"{STEM}{place}.safetensors")
    if len(drafts) > 1:
        (folder / INDEX).write_text(index_text(files, total))


def grouped(tensors: Iterable[tuple[str, Tensor]], most: float) -> Iterator[dict[str, Tensor]]:
    """Tensors in order, as many together as have `most` bytes."""
    group: dict[str, Tensor] = {}
    total = 0
    for name, tensor in tensors:
        if group and total + tensor.nbytes > most:
            yield group
            group, total = {}, 0
        group[name] = tensor
        total += tensor.nbytes
    yield group


def save_tencent(folder: Path, part: str, weights: Weights, max_shard_bytes: float = 5e9) -> None:
    """Write weights with diffusers names, such as a checkpoint's, to a folder in Tencent's layout."""
    theirs = weights.renamed(to_tencent(part, weights.names))
    save_weights(folder, ((name, theirs.read(name)) for name in theirs.names), max_shard_bytes)


def export(checkpoint: Path, output: Path, layout: str, model_path: Path | None = None) -> None:
    """Write everything to a draft folder, then rename it."""
    if output.exists():
        raise ValueError(f"--output {output} exists; name another folder")
    manifest.check(checkpoint)
    adapter = checkpoint / LORA_FILE
    if layout == "lora" and not adapter.is_file():
        raise ValueError(
            f"{checkpoint} holds all weights and no adapter; use --layout diffusers or tencent"
        )
    drafts = foreign.new_folder(output)
    draft = drafts / layout
    try:
        if layout == "lora":
            draft.mkdir()
            foreign.copy_regular(adapter, draft / LORA_FILE)
        else:
            write_diffusers(checkpoint, drafts / "diffusers", model_path)
        if layout == "tencent":
            write_tencent(drafts / "diffusers", draft)
        hashes = {}
        for file in sorted(draft.iterdir()):
            manifest.sync(file)
            hashes[file.name] = manifest.file_sha256(file)
        manifest.commit(draft, output, hashes)
    finally:
        shutil.rmtree(drafts)


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        args = parse_arguments(arguments)
        export(args.checkpoint, args.output, args.layout, args.model_path)
    except (ValueError, FileNotFoundError) as error:
        print(f"export_checkpoint.py: {error}", file=sys.stderr)
        return 2
    print(f"wrote {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
