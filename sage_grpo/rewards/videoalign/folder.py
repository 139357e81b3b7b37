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
from sage_grpo.files.tensor_files import all_finite
from sage_grpo.files.torch_files import convert, read_tensors
from sage_grpo.rewards.video_frames import MEAN, MERGE, PAIR, PATCH, STD

DIMENSIONS = ("VQ", "MQ", "TA")
TOKENS = tuple(f"<|{name}_reward|>" for name in DIMENSIONS)  # where the scores are read
VIDEO_TOKEN = "<|video_pad|>"
PAD_TOKEN = "<|endoftext|>"
PLACEHOLDER = "{text_prompt}"
CHUNKS = "flash_in_chunks"  # with "flash" in its name, an attention is given all frames in one call

# What this code implements; a folder with other values holds a different model.
MODEL_CONFIG = {
    "data_config": {
        "eval_dim": list(DIMENSIONS),
        "prompt_template_type": "detailed_special",
        "sample_type": "uniform",
    },
    "model_config": {"use_special_tokens": True, "reward_token": "special"},
    "peft_lora_config": {"use_rslora": False},
}
PREPROCESSOR = {
    "patch_size": PATCH,
    "merge_size": MERGE,
    "temporal_patch_size": PAIR,
    "image_mean": list(MEAN),
    "image_std": list(STD),
}


def expect(path: Path, values: Any, expected: Mapping[str, Any]) -> Any:
    """The given values, which are those of a JSON file; an error if `expected` ones, possibly nested, differ."""
    for name, wanted in expected.items():
        value = values.get(name) if isinstance(values, dict) else None
        if isinstance(wanted, Mapping):
            expect(path, value, wanted)
        elif value != wanted:
            raise ValueError(
                f"{path} has {name} {value!r}, but only {wanted!r} is known; it is of another version"
            )
    return values


def read_settings(folder: Path) -> dict[str, Any]:
    """Read `model_config.json` and check the files that must match this code."""
    if not folder.is_dir():
        raise FileNotFoundError(
            f"the reward folder {folder} does not exist; name it with --reward_path"
        )
    preprocessor = folder / "base_config" / "preprocessor_config.json"
    expect(preprocessor, read_config(preprocessor), PREPROCESSOR)

    path = folder / "model_config.json"
    settings = expect(path, read_config(path), MODEL_CONFIG)
    output_dim = settings["model_config"].get("output_dim")
    if output_dim not in (1, len(DIMENSIONS)):
        raise ValueError(f"{path} has output_dim {output_dim}, which must be 1 or 3")
    norm = settings.get("inference_config") or {}
    if not isinstance(norm, dict):
        raise ValueError(
            f"{path} has inference_config {norm!r:.100}, which must be an object; download it again"
        )

    values = {"min_frame_pixels": 1} | settings["data_config"] | settings["peft_lora_config"]
    names = ("fps", "max_frame_pixels", "min_frame_pixels", "lora_r", "lora_alpha")
    numbers = {name: values.get(name) for name in names}
    if norm:
        numbers |= {f"{name}_std": norm.get(f"{name}_std") for name in DIMENSIONS}
    check_kinds(path, numbers, dict.fromkeys(numbers, float))
    return settings | {"inference_config": norm or None}


def newest_checkpoint(folder: Path) -> Path:
    """The folder checkpoint-N with the largest N."""
    by_step = {}
    for path in folder.glob("checkpoint-*"):
        step = path.name.removeprefix("checkpoint-")
        if step.isdigit():
            by_step[int(step)] = path
    if not by_step:
        raise FileNotFoundError(f"{folder} has no checkpoint-N folder; download it again")
    return by_step[max(by_step)]


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
    """The tokenizer of a checkpoint, with the chat template of the base model."""
    template_file = folder / "base_config" / "chat_template.json"
    template = read_config(template_file).get("chat_template")
    if not isinstance(template, str):
        raise ValueError(f"{template_file} has no chat_template; download it again")

    file = checkpoint / "tokenizer" / "tokenizer.json"
    read_object(file)
    with naming(file):
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(file), chat_template=template)
    missing = {*TOKENS, VIDEO_TOKEN, PAD_TOKEN} - tokenizer.get_added_vocab().keys()
    if missing:
        raise ValueError(
            f"{file} does not know {min(missing)}; it is not the tokenizer of this reward"
        )
    return tokenizer


def check_folder(folder: Path) -> None:
    """Reject an incomplete folder without loading its weights."""
    read_settings(folder)
    read_template(folder)
    checkpoint = newest_checkpoint(folder)
    read_tokenizer(folder, checkpoint)
    files = ("model.safetensors", "model.pth", "adapter_model.safetensors")
    if not any((checkpoint / name).is_file() for name in files):
        raise FileNotFoundError(
            f"{checkpoint / 'model.safetensors'} is missing; download that folder again"
        )


def open_weights(path: Path) -> dict[str, Tensor]:
    """Tensors of a safetensors file, read when used; if it is missing, the published torch file is converted first."""
    source = path.with_suffix(".pth")
    if not path.is_file() and not source.is_file():
        raise FileNotFoundError(f"{path} is missing; download that folder again")
    with naming(path):
        if not path.is_file() and os.access(path.parent, os.W_OK):
            convert(source)
        return load_file(path) if path.is_file() else read_tensors(source)


def read_weights(path: Path) -> dict[str, Tensor]:
    """Like `open_weights`, but rejects values that are not finite."""
    tensors = open_weights(path)
    with naming(path):
        not_finite = [name for name, tensor in tensors.items() if not all_finite(tensor)]
    if not_finite:
        raise ValueError(
            f"{path} is damaged: {printable(not_finite[0])} is not finite; "
            "download or convert it again"
        )
    return tensors


def weight_files(folder: Path, checkpoint: Path) -> list[Path]:
    """The files of all weights, in either layout. Of a tensor in several, the last counts."""
    if not (checkpoint / "adapter_model.safetensors").is_file():
        return [checkpoint / "model.safetensors"]
    base_files = sorted((folder / "base_config").glob("*.safetensors"))
    if not base_files:
        raise FileNotFoundError(
            f"{folder / 'base_config'} has no weights (*.safetensors), which {checkpoint} adapts"
        )
    return [
        *base_files,
        checkpoint / "non_lora_state_dict.safetensors",
        checkpoint / "adapter_model.safetensors",
    ]


def read_checkpoint(folder: Path, checkpoint: Path) -> dict[str, Tensor]:
    """All weights under their published names."""
    tensors = {}
    for file in weight_files(folder, checkpoint):
        tensors |= read_weights(file)
    return tensors


def model_weights(
    published: Mapping[str, Tensor], lora_scale: float, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Weights under `Qwen2VLModel` names with LoRA merged in fp32, and the fp32 head `rm_head.weight`."""
    weights = {}
    for published_name, tensor in published.items():
        name = published_name.removeprefix("base_model.model.").replace(".base_layer.", ".")
        weights[name] = tensor
    weights.pop("lm_head.weight", None)
    _merge_lora(weights, lora_scale)

    head = weights.pop("rm_head.weight", None)
    renamed = {}
    for name, tensor in weights.items():
        new_name = f"language_{name}" if name.startswith("model.") else name
        renamed[new_name] = tensor.to(dtype)
    if head is not None:
        renamed["rm_head.weight"] = head.float()
    return renamed


def _merge_lora(weights: dict[str, Tensor], scale: float) -> None:
    """W <- W + scale * B A, in fp32. Tensors without a counterpart stay, and are rejected later as unexpected."""
    for name_a in [name for name in weights if ".lora_A." in name]:
        name_b = name_a.replace(".lora_A.", ".lora_B.")
        layer = name_a.split(".lora_A.")[0] + ".weight"
        if layer in weights and name_b in weights:
            change = weights.pop(name_b).float() @ weights.pop(name_a).float()
            # in place: new memory for each of a billion values takes longer than the sums
            weights[layer] = change.mul_(scale).add_(weights[layer])


def load_model(
    folder: Path, checkpoint: Path, settings: Mapping[str, Any], dtype: torch.dtype
) -> tuple[Any, Tensor]:
    """Qwen2-VL without its language head, and the reward head (output_dim, hidden) in fp32, both on the CPU."""
    path = folder / "base_config" / "config.json"
    expect(path, read_config(path), {"model_type": "qwen2_vl"})
    with naming(path):
        config = Qwen2VLConfig.from_pretrained(folder / "base_config", attn_implementation="sdpa")

    # 1. the weights, LoRA merged
    lora = settings["peft_lora_config"]
    published = read_checkpoint(folder, checkpoint)
    has_lora = any(".lora_A." in name for name in published)
    if has_lora != lora.get("lora_enable"):
        raise ValueError(
            f"{checkpoint} does not fit lora_enable {lora.get('lora_enable')} "
            f"of {folder / 'model_config.json'}"
        )
    with naming(checkpoint):
        weights = model_weights(published, lora["lora_alpha"] / lora["lora_r"], dtype)
        num_embeddings = len(weights.get("language_model.embed_tokens.weight", ()))

    # 2. the model; the base model has more embeddings than the tokenizer has tokens
    config.text_config.vocab_size = num_embeddings
    with naming(path), init_empty_weights():
        model = Qwen2VLModel(config)
        model.rm_head = nn.Linear(
            config.text_config.hidden_size, settings["model_config"]["output_dim"], bias=False
        )
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as error:  # lists what is missing, unknown or of another shape
        raise ValueError(
            f"the weights in {checkpoint} are not those of base_config/config.json "
            f"({printable(error)}); download both again"
        ) from error

    # 3. precision and attention
    head = model.rm_head.weight.detach()
    del model.rm_head  # it stays in fp32
    _keep_precision(model.visual.rotary_pos_emb)
    AttentionInterface.register(CHUNKS, attend_in_chunks)
    model.visual.config._attn_implementation = CHUNKS
    # The cast also rounds the rotary frequencies, which changes scores; the model was trained that way.
    return model.to(dtype).eval().requires_grad_(False), head


def attend_in_chunks(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: None = None,
    *,
    scaling: float,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of the vision model, which stays inside a frame: (1, H, S, E) -> (1, S, H, E).

    Frames of equal size share one call; transformers makes one for each frame and layer, for which a GPU waits.
    cu_seq_lens_q: (frames + 1,) where the frames begin and end along S.
    """
    frames = len(cu_seq_lens_q) - 1
    if frames * max_length_q == query.shape[2]:

        def by_frame(x: Tensor) -> Tensor:
            """(1, H, S, E) -> (frames, H, S / frames, E)"""
            return x[0].unflatten(1, (frames, -1)).transpose(0, 1)

        chunks = [(by_frame(query), by_frame(key), by_frame(value))]
    else:
        lengths = cu_seq_lens_q.diff().tolist()
        chunks = list(
            zip(
                query.split(lengths, dim=2),
                key.split(lengths, dim=2),
                value.split(lengths, dim=2),
                strict=True,
            )
        )
    outputs = [
        scaled_dot_product_attention(q, k, v, scale=scaling).transpose(1, 2).flatten(0, 1)
        for q, k, v in chunks
    ]
    return torch.cat(outputs)[None], None


def _keep_precision(rotary: nn.Module) -> None:
    """Vision angles, cosines and sines in the precision of the frequencies, as in training; later versions use fp32."""

    def forward(_: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None] * rotary.inv_freq
        cosines = rotary.recomposition_frequencies(angles.cos())
        sines = rotary.recomposition_frequencies(angles.sin())
        return cosines, sines

    rotary.forward = forward
