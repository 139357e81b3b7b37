"""Export a run's checkpoint as a transformer folder, for sampling with other software.

    python scripts/export_checkpoint.py --checkpoint RUN/checkpoints/step-000100 --output FOLDER --layout diffusers

layout diffusers   FOLDER replaces transformer/ in a diffusers model folder
       tencent     HunyuanVideo-1.5: FOLDER replaces transformer/480p_t2v, or the matching version, in Tencent's layout
       lora        FOLDER holds the adapter in diffusers format
       comfyui     FOLDER holds one file, named like FOLDER: an adapter for ComfyUI/models/loras, at strength 1, or
                   all weights for ComfyUI/models/diffusion_models
Of a model with two transformers, FOLDER holds transformer/ and transformer_2/, two adapters, or for ComfyUI two files
that end in _high_noise and _low_noise. For the first two layouts, an adapter is merged into the model it was trained
on. A run of all weights needs this only for checkpoints without a transformer/ folder, which `export_interval` adds. If
the run averaged its weights, the averaged ones are exported. Every file of the checkpoint is first verified by its
hash; FOLDER appears once it is complete, with a model card.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sage_grpo.config.command_line import Parser, answer_early, answering

DTYPE_NAMES = ("float32", "bfloat16", "float16")


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("scripts/export_checkpoint.py", __doc__)
    add = parser.add_argument
    add(
        "--checkpoint",
        type=Path,
        metavar="FOLDER",
        required=True,
        help="checkpoint to export, RUN/checkpoints/step-N; a run stands for its newest",
    )
    add("--output", type=Path, metavar="FOLDER", required=True, help="folder to create")
    add(
        "--layout",
        choices=("diffusers", "tencent", "lora", "comfyui"),
        default="diffusers",
        help="layout of the folder, see above",
    )
    add(
        "--dtype",
        choices=DTYPE_NAMES,
        help="data type of layout comfyui (default: that of the checkpoint)",
    )
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

from sage_grpo.exit_codes import DONE
from sage_grpo.files import foreign, manifest
from sage_grpo.files.json_files import naming, printable, read_config, read_object
from sage_grpo.files.paths import check_folder
from sage_grpo.models import comfyui
from sage_grpo.models.backbone import Backbone, Origin
from sage_grpo.models.denoiser import TRANSFORMER
from sage_grpo.models.hunyuan15.backbone import Hunyuan15
from sage_grpo.models.hunyuan15.folder import ModelFolder
from sage_grpo.models.hunyuan15.tencent import RULES, SETTINGS, diffusers_config
from sage_grpo.models.hunyuan15.transformer import PackedTransformer
from sage_grpo.models.lora import LORA_FILES, read_scaled_adapter, saved_adapters
from sage_grpo.models.names import to_original
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
from sage_grpo.runs.card import model_card
from sage_grpo.runs.history import RunHistory, read_run
from sage_grpo.train.checkpoint import read_state
from sage_grpo.train.checkpoint_folders import weights_of
from sage_grpo.train.export import is_one_of_two, origin_of, recipe_of

DTYPES = dict(zip(DTYPE_NAMES, (torch.float32, torch.bfloat16, torch.float16), strict=True))
IN_FOLDER_NAME = ("target_size", "task_type")  # settings that Tencent's layout has there


def export(
    checkpoint: Path,
    output: Path,
    layout: str,
    model_path: Path | None = None,
    dtype: str | None = None,
) -> None:
    """Write everything to a draft folder, then rename it."""
    checkpoint = weights_of(checkpoint)
    if os.path.lexists(output):
        raise ValueError(f"--output {output} exists; name another folder")
    if dtype is not None and layout != "comfyui":
        raise ValueError(f"--dtype is for --layout comfyui; leave it out for {layout}")
    check_folder(output.parent, "--output")
    manifest.check(checkpoint)
    torch_dtype = None if dtype is None else DTYPES[dtype]
    adapters = saved_adapters(checkpoint)
    if layout == "lora" and not adapters:
        raise ValueError(
            f"{checkpoint} holds all weights and no adapter; use --layout diffusers or tencent"
        )
    if layout == "tencent":
        check_tencent(checkpoint, model_path)

    drafts = foreign.new_folder(output)
    draft = drafts / layout
    try:
        if layout == "lora":
            draft.mkdir()
            for adapter in adapters.values():
                foreign.copy_regular(adapter, draft / adapter.name)
        elif layout == "comfyui" and adapters:
            draft.mkdir()
            has_two = is_one_of_two(checkpoint, adapters)
            for expert, adapter in adapters.items():
                file = draft / comfyui.file_name(output.name, expert, has_two)
                comfyui.write_lora(adapter, file, torch_dtype)
        else:
            write_diffusers(checkpoint, drafts / "diffusers", model_path)
        if layout == "tencent":
            write_tencent(drafts / "diffusers", draft)
        if layout == "comfyui" and not adapters:
            draft.mkdir()
            folders = transformer_folders(drafts / "diffusers")
            for expert, folder in folders.items():
                file = draft / comfyui.file_name(output.name, expert, len(folders) > 1)
                write_comfyui(folder, file, torch_dtype)
        write_card(checkpoint, draft, layout, model_path)

        hashes = {}
        for file in sorted(path for path in draft.rglob("*") if path.is_file()):
            manifest.sync(file)
            hashes[file.relative_to(draft).as_posix()] = manifest.file_sha256(file)
        try:
            manifest.commit(draft, output, hashes, replaces=False)
        except OSError as error:
            if os.path.lexists(output):
                raise ValueError(
                    f"--output {output} appeared during the export; name another folder"
                ) from error
            raise
    finally:
        shutil.rmtree(drafts)


def transformer_folders(folder: Path) -> dict[str, Path]:
    """The folders of the transformers that `write_diffusers` wrote: `folder` itself, or folders in it."""
    inside = {name: folder / name for name in LORA_FILES if (folder / name).is_dir()}
    return inside or {TRANSFORMER: folder}


def write_card(checkpoint: Path, folder: Path, layout: str, model_path: Path | None) -> None:
    """Write the model card of what was exported. Weights are worth more than their card: what goes wrong is printed."""
    try:
        state = read_state(checkpoint)
        config = state["config"]
        root = model_path or Path(config["pretrained_model_root"])
        backbone = open_backbone(root, version=version_of(config, root), complete=False)
        prints = state["fingerprints"]
        adapters = saved_adapters(checkpoint)
        # the checkpoint first: the folder of the model may not be here
        experts = list(adapters) or exported_transformers(checkpoint) or list(backbone.experts)
        has_two = is_one_of_two(checkpoint, adapters) or len({*experts, *backbone.experts}) > 1
        files = model_card(
            recipe_of(config),
            history_of(checkpoint, state["step"]),
            step=state["step"],
            reward=prints.get("reward", {}).get("weights", "of its run"),
            base=prints.get("base weights", "unknown"),
            image=backbone.sees_image,
            # a folder that is not here may have held any weights of that architecture
            origin=origin_of(backbone) if root.is_dir() else Origin(),
            layout=layout,
            experts=experts,
            num_transformers=2 if has_two else 1,
        )
        for name, content in files.items():
            (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    except Exception as error:
        print(f"export_checkpoint.py: no model card: {printable(error)}", file=sys.stderr)


def history_of(checkpoint: Path, step: int) -> RunHistory:
    """The run that the checkpoint lies in, until that iteration; an empty one if it was moved away from its run."""
    run = checkpoint.resolve().parent.parent
    metrics = run / "metrics.jsonl"
    if metrics.is_file() and not metrics.is_symlink():
        return read_run(run).until(step)
    return RunHistory(run, [], [], [])


def version_of(config: dict[str, Any], root: Path) -> str | None:
    """The transformer's version, where the folder needs one to choose."""
    is_tencent = ModelFolder(root).is_tencent or not root.is_dir()
    return config["pretrained_transformer_version"] if is_tencent else None


# The layout of diffusers


def full_config(config: dict[str, Any]) -> str:
    """config.json of diffusers with every setting."""
    with torch.device("meta"):
        return PackedTransformer.from_config(config).to_json_string()


def write_diffusers(checkpoint: Path, folder: Path, model_path: Path | None) -> None:
    """Write a checkpoint's transformer, or in folders of their own those of two that it changed.

    Adapters and shards change `model_path`, by default the run's model.
    """
    exported = exported_transformers(checkpoint)
    if exported:
        if model_path is not None:
            raise ValueError(
                f"--model_path is for adapters and shards; {checkpoint} has transformer/: leave it out"
            )
        for name in exported:
            # the manifest was checked, but nothing may lead elsewhere even if the checkpoint changes meanwhile
            shutil.copytree(
                checkpoint / name,
                folder / name if len(exported) > 1 else folder,
                symlinks=True,
                copy_function=foreign.copy_regular,
            )
        return

    base = open_base(checkpoint, model_path)
    adapters = saved_adapters(checkpoint)
    base_weights = base.open_weights()
    for name, transformer in base.empty_transformer().experts.items():
        prefix = f"{name}." if len(base.experts) > 1 else ""
        if name in adapters:
            tensors = merged(base_weights.below(prefix), adapters[name])
        elif not adapters:
            tensors = trained(checkpoint, base_weights, base.experts, prefix)
        else:  # the run has not changed it
            continue
        place = folder / name if prefix else folder
        save_weights(place, tensors)
        (place / "config.json").write_text(transformer.to_json_string())


def exported_transformers(checkpoint: Path) -> list[str]:
    """The folders of a checkpoint with all weights of a transformer; empty for adapters and shards."""
    return [name for name in LORA_FILES if (checkpoint / name).is_dir()]


def open_base(checkpoint: Path, model_path: Path | None) -> Backbone:
    """The model that adapters or shards change: `model_path`, by default the run's."""
    file = checkpoint / "trainer" / "state.json"
    config = read_object(file).get("config")
    root = model_path or Path(setting(config, "pretrained_model_root", file))
    version = None
    if ModelFolder(root).is_tencent:
        version = setting(config, "pretrained_transformer_version", file)
    return open_backbone(root, version=version, complete=False)


def setting(config: Any, name: str, file: Path) -> str:
    """A setting of the run, as its checkpoint recorded it."""
    value = config.get(name) if isinstance(config, dict) else None
    if not isinstance(value, str) or not value.isprintable() or not value:
        raise ValueError(
            f"{file} does not say what {name} was: "
            "this is not a checkpoint of post_train.py, or it is damaged"
        )
    return value


def trained(
    checkpoint: Path, base: Weights, experts: Sequence[str], prefix: str
) -> Iterator[tuple[str, Tensor]]:
    """Transformer tensors, one at a time, from the ranks' shards; those never trained are the base model's.

    prefix: of the names of one of several transformers, `experts`.
    """
    weights = trained_weights(checkpoint, lambda: base, experts)
    check_names(weights, {name: base.shape(name) for name in base.names})
    weights = weights.below(prefix)
    return ((name, weights.read(name)) for name in weights.names)


def merged(weights: Weights, file: Path) -> Iterator[tuple[str, Tensor]]:
    """Transformer tensors, one at a time, with a saved adapter's `alpha / r * B A` added; dtypes are kept."""
    adapter, scale = read_scaled_adapter(file)
    factors = {}  # name of a weight -> its A (r, in) and B (out, r)
    for name_a in adapter:
        if ".lora_A." in name_a:
            name_b = name_a.replace(".lora_A.", ".lora_B.")
            factors[name_a.replace(".lora_A.", ".")] = (adapter[name_a], adapter[name_b])
    for name, (a, b) in factors.items():
        shape = (b.shape[0], a.shape[1])
        if name not in weights.names or weights.shape(name) != shape:
            raise ValueError(
                f"{file} does not fit '{weights.where}': {name} of shape {shape} is not there"
            )

    for name in weights.names:
        value = weights.read(name)
        if name in factors:
            a, b = factors[name]
            change = scale * (b.double() @ a.double())
            value = (value.double() + change).to(value.dtype)
        yield name, value


# Tencent's layout


def check_tencent(checkpoint: Path, model_path: Path | None) -> None:
    """Reject a checkpoint of a model without Tencent's layout, before weights are read."""
    exported = exported_transformers(checkpoint)
    if exported:
        configs = [read_config(checkpoint / name / "config.json") for name in exported]
        stock = PackedTransformer.stock.__name__
        has_layout = all(config.get("_class_name") == stock for config in configs)
    else:
        has_layout = isinstance(open_base(checkpoint, model_path), Hunyuan15)
    if not has_layout:
        raise ValueError(
            f"{checkpoint} is not of HunyuanVideo-1.5, the only model with Tencent's layout; "
            "use --layout diffusers"
        )


def write_tencent(diffusers: Path, folder: Path) -> None:
    """Write the transformer in Tencent's layout; rejects settings that its config.json cannot express."""
    config = read_config(diffusers / "config.json")
    with naming(diffusers / "config.json"):
        tencent_config = tencent_transformer_config(config)
        read_back = diffusers_config("transformer", tencent_config, DEFAULT_VERSION)
        read_back = json.loads(full_config(read_back))
    for name, value in read_back.items():
        if name not in IN_FOLDER_NAME and value != config.get(name):
            raise ValueError(
                f"Tencent's config.json cannot express that {name} is {config.get(name)}; "
                "use --layout diffusers"
            )
    save_tencent(folder, "transformer", open_folder(diffusers))
    (folder / "config.json").write_text(json.dumps(tencent_config, indent=2) + "\n")


def to_tencent(part: str, names: Iterable[str]) -> dict[str, tuple[Rows, ...]]:
    """The inverse of `to_diffusers`: the diffusers rows that make up each Tencent tensor."""
    return to_original(RULES[part], names, "Tencent's layout")


def tencent_transformer_config(config: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `diffusers_config`, from all arguments.

    Size and task are in the folder name; refiner layers and norm cannot be expressed.
    """
    renamed = {tencent: config[name] for tencent, name in SETTINGS["transformer"].items()}
    return renamed | {
        "in_channels": (config["in_channels"] - 1) // 2,
        "concat_condition": True,
        "mm_single_blocks_depth": 0,
        "hidden_size": config["num_attention_heads"] * config["attention_head_dim"],
        "patch_size": [config["patch_size_t"], config["patch_size"], config["patch_size"]],
    }


def save_tencent(folder: Path, part: str, weights: Weights, max_shard_bytes: float = 5e9) -> None:
    """Write weights with diffusers names, such as a checkpoint's, to a folder in Tencent's layout."""
    renamed = weights.renamed(to_tencent(part, weights.names))
    tensors = ((name, renamed.read(name)) for name in renamed.names)
    save_weights(folder, tensors, max_shard_bytes)


# ComfyUI's layout


def write_comfyui(diffusers: Path, file: Path, dtype: torch.dtype | None) -> None:
    """Write a transformer as ComfyUI reads it. It reads one file, so all weights are in memory at once."""
    weights = comfyui.all_weights(open_folder(diffusers))
    tensors = {name: weights.read(name) for name in weights.names}
    save_file(comfyui.cast(tensors, dtype), file, metadata={"format": "pt"})


# Files


def save_weights(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], max_shard_bytes: float = 5e9
) -> None:
    """Write files with diffusers' names. If `tensors` is a generator, only one shard at a time is in memory."""
    folder.mkdir(parents=True, exist_ok=True)
    existing = sorted(folder.glob(f"{STEM}*.safetensors*"))
    if existing:
        raise ValueError(f"'{folder}' already holds {existing[0].name}; write to another folder.")

    shard_names = []  # names of the tensors in each shard
    total_bytes = 0
    for shard in shards(tensors, max_shard_bytes):
        shard_names.append(list(shard))
        total_bytes += sum(tensor.nbytes for tensor in shard.values())
        contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in shard.items()}
        save_file(contiguous, shard_draft(folder, len(shard_names)), metadata={"format": "pt"})
        del shard, contiguous  # before filling the next one

    # final names contain the number of shards, which is known only now
    count = len(shard_names)
    file_of = {}
    for number, names in enumerate(shard_names, 1):
        file = f"{STEM}-{number:05d}-of-{count:05d}.safetensors"
        if count == 1:
            file = f"{STEM}.safetensors"
        shard_draft(folder, number).rename(folder / file)
        file_of |= dict.fromkeys(names, file)
    if count > 1:
        (folder / INDEX).write_text(index_text(file_of, total_bytes))


def shard_draft(folder: Path, number: int) -> Path:
    return folder / f"{STEM}-{number:05d}.tmp"


def shards(tensors: Iterable[tuple[str, Tensor]], max_bytes: float) -> Iterator[dict[str, Tensor]]:
    """Tensors in order, as many together as fit into `max_bytes`."""
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > max_bytes:
            yield shard
            shard = {}
            size = 0
        shard[name] = tensor
        size += tensor.nbytes
    yield shard


@answering("export_checkpoint.py: ")
def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_arguments(arguments)
    export(args.checkpoint, args.output, args.layout, args.model_path, args.dtype)
    print(f"wrote {args.output}")
    return DONE


if __name__ == "__main__":
    sys.exit(main())
