"""Reads and checks the folder of VideoAlign's weights. Errors name the file.

VideoReward/
  model_config.json           frame sampling, LoRA, mean and standard deviation of each score
  prompt_template.txt         the rubric the model was trained with, byte for byte
  base_config/                config, preprocessor_config and chat_template .json of Qwen2-VL
  checkpoint-N/tokenizer/     tokenizer with the three reward tokens
  checkpoint-N/model.safetensors    all weights; or, split: adapter_model.safetensors and
                                    non_lora_state_dict.safetensors, on the weights in base_config/*.safetensors

The published folder has model.pth (or non_lora_state_dict.pth) instead, which is converted to safetensors once.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedTokenizerFast, Qwen2VLConfig, Qwen2VLModel

from sage_grpo.files.json_files import check_kinds, naming, printable, read_config, read_object
from sage_grpo.files.torch_files import convert, read_tensors
from sage_grpo.rewards.video_frames import MEAN, MERGE, PAIR, PATCH, STD

DIMENSIONS = ("VQ", "MQ", "TA")
TOKENS = tuple(f"<|{name}_reward|>" for name in DIMENSIONS)
PLACEHOLDER = "{text_prompt}"
CHUNKS = "flash_in_chunks"  # with "flash" in its name, an attention is given all frames in one call
MODEL_CONFIG = {  # what this code implements; a folder with other values holds a different model
    "data_config": {
        "eval_dim": list(DIMENSIONS),
        "prompt_template_type": "detailed_special",
        "sample_type": "uniform",
    },
    "model_config": {"use_special_tokens": True, "reward_token": "special"},
    "peft_lora_config": {"use_rslora": False},
}
PREPROCESSOR = {"patch_size": PATCH, "merge_size": MERGE, "temporal_patch_size": PAIR}
PREPROCESSOR |= {"image_mean": list(MEAN), "image_std": list(STD)}


def expect(path: Path, values: Any, expected: Mapping[str, Any]) -> Any:
    """The values of a JSON object in a file; `expected` lists some, possibly nested, that it must contain."""
    for name, wanted in expected.items():
        found = values.get(name) if isinstance(values, dict) else None
        if isinstance(wanted, Mapping):
            expect(path, found, wanted)
        elif found != wanted:
            raise ValueError(
                f"{path} has {name} {found!r}, but only {wanted!r} is known; it is of another version"
            )
    return values


def read_settings(folder: Path) -> dict[str, Any]:
    """Read `model_config.json` and check the files that must match this code."""
    if not folder.is_dir():
        raise FileNotFoundError(
            f"the reward folder {folder} does not exist; name it with --reward_path"
        )
    preprocessor, path = (
        folder / "base_config" / "preprocessor_config.json",
        folder / "model_config.json",
    )
    expect(preprocessor, read_config(preprocessor), PREPROCESSOR)
    settings = expect(path, read_config(path), MODEL_CONFIG)
    if settings["model_config"].get("output_dim") not in (1, len(DIMENSIONS)):
        raise ValueError(
            f"{path} has output_dim {settings['model_config'].get('output_dim')}, which must be 1 or 3"
        )
    norm = settings.get("inference_config") or {}
    if not isinstance(norm, dict):
        raise ValueError(
            f"{path} has inference_config {norm!r:.100}, which must be an object; download it again"
        )
    known = {"min_frame_pixels": 1} | settings["data_config"] | settings["peft_lora_config"]
    numbers = {
        n: known.get(n)
        for n in ("fps", "max_frame_pixels", "min_frame_pixels", "lora_r", "lora_alpha")
    }
    numbers |= {f"{name}_std": norm.get(f"{name}_std") for name in DIMENSIONS if norm}
    check_kinds(path, numbers, dict.fromkeys(numbers, float))
    return settings | {"inference_config": norm or None}


def newest_checkpoint(folder: Path) -> Path:
    found = {
        int(path.name[11:]): path
        for path in folder.glob("checkpoint-*")
        if path.name[11:].isdigit()
    }
    if not found:
        raise FileNotFoundError(f"{folder} has no checkpoint-N folder; download it again")
    return found[max(found)]


def read_template(folder: Path) -> str:
    """The rubric: nothing stripped, no line endings converted, because either would change the scores."""
    path = folder / "prompt_template.txt"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; it is downloaded apart from the weights")
    with naming(path):
        text = path.read_bytes().decode()
    for part in (PLACEHOLDER, *TOKENS):
        if text.count(part) != 1:
            raise ValueError(
                f"{path} holds {part} {text.count(part)} times, but must hold it once; download it again"
            )
    return text


def read_tokenizer(folder: Path, checkpoint: Path) -> PreTrainedTokenizerFast:
    chat_file, file = (
        folder / "base_config" / "chat_template.json",
        checkpoint / "tokenizer" / "tokenizer.json",
    )
    chat = read_config(chat_file).get("chat_template")
    if not isinstance(chat, str):
        raise ValueError(f"{chat_file} has no chat_template; download it again")
    read_object(file)
    with naming(file):
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(file), chat_template=chat)
    if missing := sorted(
        {*TOKENS, "<|video_pad|>", "<|endoftext|>"} - tokenizer.get_added_vocab().keys()
    ):
        raise ValueError(
            f"{file} does not know {missing[0]}; it is not the tokenizer of this reward"
        )
    return tokenizer


def check_folder(folder: Path) -> None:
    """Reject an incomplete folder without loading its weights."""
    read_settings(folder)
    read_template(folder)
    read_tokenizer(folder, checkpoint := newest_checkpoint(folder))
    files = ("model.safetensors", "model.pth", "adapter_model.safetensors")
    if not any((checkpoint / name).is_file() for name in files):
        raise FileNotFoundError(
            f"{checkpoint / 'model.safetensors'} is missing; download that folder again"
        )


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file, all values finite; if it is missing, convert the published torch file first."""
    source = path.with_suffix(".pth")
    if not path.is_file() and not source.is_file():
        raise FileNotFoundError(f"{path} is missing; download that folder again")
    with naming(path):
        if not path.is_file() and os.access(path.parent, os.W_OK):
            convert(source)
        tensors = load_file(path) if path.is_file() else read_tensors(source)
        broken = next(
            (name for name, tensor in tensors.items() if not tensor.isfinite().all()), None
        )
    if broken:
        raise ValueError(
            f"{path} is damaged: {printable(broken)} is not finite; download or convert it again"
        )
    return tensors


def read_checkpoint(folder: Path, checkpoint: Path) -> dict[str, Tensor]:
    """All weights under their published names, from either layout."""
    if not (checkpoint / "adapter_model.safetensors").is_file():
        return read_weights(checkpoint / "model.safetensors")
    base = sorted((folder / "base_config").glob("*.safetensors"))
    if not base:
        raise FileNotFoundError(
            f"{folder / 'base_config'} has no weights (*.safetensors), which {checkpoint} adapts"
        )
    files = [
        *base,
        checkpoint / "non_lora_state_dict.safetensors",
        checkpoint / "adapter_model.safetensors",
    ]
    return {name: tensor for file in files for name, tensor in read_weights(file).items()}


def model_weights(
    published: Mapping[str, Tensor], lora_scale: float, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Weights under `Qwen2VLModel` names with LoRA merged in fp32, and the fp32 head `rm_head.weight`."""
    weights = {
        name.removeprefix("base_model.model.").replace(".base_layer.", "."): w
        for name, w in published.items()
    }
    weights.pop("lm_head.weight", None)
    for name in [name for name in weights if ".lora_A." in name]:
        layer, up = name.split(".lora_A.")[0] + ".weight", name.replace(".lora_A.", ".lora_B.")
        if (
            layer in weights and up in weights
        ):  # unmatched tensors stay, and are rejected later as unexpected
            change = weights.pop(up).float() @ weights.pop(name).float()
            weights[layer] = weights[layer].float() + lora_scale * change
    head = weights.pop("rm_head.weight", None)
    renamed = {
        f"language_{name}" if name.startswith("model.") else name: w.to(dtype)
        for name, w in weights.items()
    }
    return renamed if head is None else renamed | {"rm_head.weight": head.float()}


def load_model(
    folder: Path, checkpoint: Path, settings: Mapping[str, Any], dtype: torch.dtype
) -> tuple[Any, Tensor]:
    """Qwen2-VL without its language head, and the reward head (output_dim, hidden) in fp32, both on the CPU."""
    path = folder / "base_config" / "config.json"
    expect(path, read_config(path), {"model_type": "qwen2_vl"})
    with naming(path):
        config = Qwen2VLConfig.from_pretrained(folder / "base_config", attn_implementation="sdpa")
    lora = settings["peft_lora_config"]
    published = read_checkpoint(folder, checkpoint)
    if any(".lora_A." in name for name in published) != (enabled := lora.get("lora_enable")):
        raise ValueError(
            f"{checkpoint} does not fit lora_enable {enabled} of {folder / 'model_config.json'}"
        )
    with naming(checkpoint):
        weights = model_weights(published, lora["lora_alpha"] / lora["lora_r"], dtype)
        rows = len(weights.get("language_model.embed_tokens.weight", ()))
    config.text_config.vocab_size = (
        rows  # the base model has more rows than the tokenizer has tokens
    )
    with naming(path), init_empty_weights():
        model = Qwen2VLModel(config)
        model.rm_head = nn.Linear(
            config.text_config.hidden_size, settings["model_config"]["output_dim"], bias=False
        )
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as error:  # lists what is missing, unknown or of another shape
        text = f"the weights in {checkpoint} are not those of base_config/config.json"
        raise ValueError(f"{text} ({printable(error)}); download both again") from error
    head = model.rm_head.weight.detach()
    del model.rm_head  # it stays in fp32
    _keep_precision(model.visual.rotary_pos_emb)
    AttentionInterface.register(CHUNKS, attend_in_chunks)
    model.visual.config._attn_implementation = CHUNKS
    # This also rounds the rotary frequencies, which changes scores; the model was trained that way.
    return model.to(dtype).eval().requires_grad_(False), head


def attend_in_chunks(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None = None, *, scaling: float,
    cu_seq_lens_q: Tensor, max_length_q: int, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention of the vision model, which stays inside a frame: (1, H, S, E) -> (1, S, H, E).

    Frames of equal size share one call; transformers makes one for each frame and layer, for which a GPU waits.
    """
    parts, count = (query, key, value), len(cu_seq_lens_q) - 1
    if count * max_length_q == query.shape[2]:
        calls = [[x[0].unflatten(1, (count, -1)).transpose(0, 1) for x in parts]]
    else:
        calls = zip(*(x.split(cu_seq_lens_q.diff().tolist(), dim=2) for x in parts), strict=True)
    out = [
        scaled_dot_product_attention(*call, scale=scaling).transpose(1, 2).flatten(0, 1)
        for call in calls
    ]
    return torch.cat(out)[None], None


def _keep_precision(rotary: nn.Module) -> None:
    """Vision angles, cosines and sines in the precision of the frequencies, as in training; later versions use fp32."""

    def forward(_: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None] * rotary.inv_freq
        return rotary.recomposition_frequencies(angles.cos()), rotary.recomposition_frequencies(
            angles.sin()
        )

    rotary.forward = forward
