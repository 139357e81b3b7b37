"""A run's checkpoint as the folder of a transformer, for whoever samples HunyuanVideo-1.5 by other means.

    python scripts/export_checkpoint.py --checkpoint RUN/checkpoints/step-000100 --output FOLDER --layout diffusers

layout diffusers   FOLDER takes the place of transformer/ in a model folder of diffusers
       tencent     FOLDER takes the place of transformer/480p_t2v, or which version it was, in one of Tencent's
       lora        FOLDER holds the adapter, as diffusers loads it
An adapter is merged into the model that it was trained on for the first two. The weights are the averaged ones of a run
that has some. Every file of the checkpoint is checked by its hash before, and FOLDER appears once it is whole.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch

from sage_grpo import manifest
from sage_grpo.models.layout import DEFAULT_VERSION, is_tencent, part_config
from sage_grpo.models.lora import LORA_FILE, merged
from sage_grpo.models.packed import PackedTransformer
from sage_grpo.models.tencent import tencent_transformer_config, transformer_config
from sage_grpo.models.weights import open_folder, open_weights, save_tencent, save_weights

NAMED = ("target_size", "task_type")  # what Tencent tells by the name of the folder


def full_config(config: dict[str, Any]) -> str:
    """config.json of diffusers with every setting."""
    with torch.device("meta"):
        return PackedTransformer.from_config(config).to_json_string()


def write_diffusers(checkpoint: Path, folder: Path, model_path: Path | None) -> None:
    """The transformer of a checkpoint; an adapter is merged into that of `model_path`, or of the run's own model."""
    if not (checkpoint / LORA_FILE).is_file():
        if model_path is not None:
            raise ValueError(f"--model_path is for adapters, but {checkpoint} holds all weights; leave it out")
        shutil.copytree(checkpoint / "transformer", folder)
        return
    run = json.loads((checkpoint / "trainer" / "state.json").read_text())["config"]
    base = model_path or Path(run["pretrained_model_root"])
    version = run["pretrained_transformer_version"] if is_tencent(base) else DEFAULT_VERSION
    save_weights(folder, merged(open_weights(base, "transformer", version), checkpoint / LORA_FILE))
    (folder / "config.json").write_text(full_config(part_config(base, "transformer", version)))


def write_tencent(diffusers: Path, folder: Path) -> None:
    """The same in Tencent's layout, refused if its config.json cannot tell the settings."""
    ours = json.loads((diffusers / "config.json").read_text())
    theirs = tencent_transformer_config(ours)
    told = json.loads(full_config(transformer_config(theirs, DEFAULT_VERSION)))
    lost = [name for name in told if name not in NAMED and told[name] != ours[name]]
    if lost:
        raise ValueError(f"Tencent's config.json cannot tell that {lost[0]} is {ours[lost[0]]}; use --layout diffusers")
    save_tencent(folder, "transformer", open_folder(diffusers))
    (folder / "config.json").write_text(json.dumps(theirs, indent=2) + "\n")


def export(checkpoint: Path, output: Path, layout: str, model_path: Path | None = None) -> None:
    """Write it all to a draft, then give that its name."""
    if output.exists():
        raise ValueError(f"--output {output} exists; name another folder")
    manifest.check(checkpoint)
    adapter, drafts = checkpoint / LORA_FILE, output.with_name(f"{output.name}.tmp")
    if layout == "lora" and not adapter.is_file():
        raise ValueError(f"{checkpoint} holds all weights and no adapter; use --layout diffusers or tencent")
    shutil.rmtree(drafts, ignore_errors=True)
    drafts.mkdir(parents=True)
    draft = drafts / layout
    try:
        if layout == "lora":
            draft.mkdir()
            shutil.copyfile(adapter, draft / LORA_FILE)
        else:
            write_diffusers(checkpoint, drafts / "diffusers", model_path)
        if layout == "tencent":
            write_tencent(drafts / "diffusers", draft)
        manifest.commit(draft, output, manifest.sealed(draft, sorted(draft.iterdir())))
    finally:
        shutil.rmtree(drafts)


def main(arguments: Sequence[str] | None = None) -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--checkpoint", type=Path, required=True, help="RUN/checkpoints/step-N")
    parser.add_argument("--output", type=Path, required=True, help="folder to make")
    parser.add_argument("--layout", choices=("diffusers", "tencent", "lora"), default="diffusers")
    parser.add_argument("--model_path", type=Path, help="model folder of an adapter; default: where the run had it")
    args = parser.parse_args(arguments)
    try:
        export(args.checkpoint, args.output, args.layout, args.model_path)
    except (ValueError, FileNotFoundError) as error:
        print(f"export_checkpoint.py: {error}", file=sys.stderr)
        return 2
    print(f"wrote {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
