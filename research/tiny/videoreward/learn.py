"""Train the embedded reward: a small Qwen2-VL in VideoAlign's folder format that judges clips of the shapes world.

    python -m research.tiny.videoreward.learn --model assets/tiny --output assets/tiny/VideoReward     minutes on a GPU

As its large relative it first learns to caption clips, and then to agree with annotators about pairs of them, by
Bradley-Terry with ties, in the loop by which `prefer learn` trains adapters. What it is measured by is in its card
(`card.py`). Everything follows from --seed.

Shapes: B sequences, L tokens, D hidden features.
"""

import argparse
import json
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import Qwen2VLConfig, Qwen2VLModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import apply_rotary_pos_emb_vision

from research.tiny.training import Recorder
from research.tiny.videoreward.folder import CHECKPOINT, unit_scale, write_folder
from research.tiny.videoreward.pairs import (
    SCORES,
    Pairs,
    accuracy,
    captions_of,
    draw_pairs,
)
from research.tiny.videoreward.pool import SOURCES, Pool, build_pool
from sage_grpo.algo.preference import tie_losses
from sage_grpo.models.registry import open_backbone
from sage_grpo.rewards.videoalign import training
from sage_grpo.rewards.videoalign.reward import PAD_TOKEN, VIDEO_TOKEN, VideoAlign
from sage_grpo.rewards.videoalign.training import Batch
from sage_grpo.rewards.videoalign.writing import HEAD, published_weights
from sage_grpo.worlds.shapes.scenes import vocabulary

TEMPLATE = (
    "\nPicture: clean colors, sharp edges, no flicker. <|VQ_reward|>\n"
    "Motion: a straight path, even and steady. <|MQ_reward|>\n"
    "Prompt: {text_prompt}. Does the clip show that? <|TA_reward|>"
)
TEXT = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "initializer_range": 0.05,
        "rope_scaling": {"type": "mrope", "mrope_section": [4, 4, 4]}}  # fmt: skip
VISION = {"depth": 4, "embed_dim": 96, "num_heads": 4, "initializer_range": 0.05}
HELD_CLIPS = 512  # per source
HELD_PAIRS = 2048  # in all
FRAMES = 8  # of a clip that are seen; two make a token
IGNORED = -100


class Judge(nn.Module):
    """A reward under training: its model, its head, and the clips it sees, cut into patches once."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        super().__init__()
        self.reward = VideoAlign(folder, device)
        self.model = self.reward.model.requires_grad_(True)
        self.head = nn.Parameter(self.reward.head.clone())
        self.reward.head = self.head

    def patches(self, pool: Pool, fps: float) -> tuple[Tensor, tuple[int, int, int]]:
        """Patches (N, P, 1176) of all clips, which have one size, and their grid."""
        parts = []
        for clips in pool.clips.split(1024):
            rows, grid = self.reward._patches(clips, fps)
            parts.append(rows.half())
        self._prepare(parts[0][:1], grid)
        return torch.cat(parts), grid

    @torch.no_grad()
    def _prepare(self, patches: Tensor, grid: tuple[int, int, int]) -> None:
        """Find what is the same for all clips of this grid: the angles of the vision tower, and where the clip stands.

        With it a forward needs no look at the numbers, and a GPU can record it.
        """
        visual = self.model.visual
        seen: dict[str, Any] = {}

        def keep_kwargs(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen.update(kwargs)

        hook = visual.blocks[0].register_forward_pre_hook(keep_kwargs, with_kwargs=True)
        visual(patches.flatten(0, 1).float(), grid_thw=torch.tensor([grid], device=patches.device))
        hook.remove()
        self.angles = tuple(part.clone() for part in seen["position_embeddings"])

        tokens = self.reward._tokens("", grid)
        video_token = self.reward.tokenizer.convert_tokens_to_ids(VIDEO_TOKEN)
        places = (tokens == video_token).nonzero().flatten()
        self.place = slice(int(places[0]), int(places[-1]) + 1)
        for block in visual.blocks:
            block.attn.forward = partial(attend_within_frames, block.attn, grid[1] * grid[2])

    def forward(self, tokens: Tensor, patches: Tensor) -> Tensor:
        """(B, L, D) final hidden states: the forward of Qwen2-VL for clips of one grid."""
        visual = self.model.visual
        angles = tuple(part.repeat(len(tokens), 1) for part in self.angles)
        x = visual.patch_embed(patches.flatten(0, 1).float())
        for block in visual.blocks:
            x = block(x, cu_seqlens=None, position_embeddings=angles)
        clip = visual.merger(x).unflatten(0, (len(tokens), -1))

        text = self.model.get_input_embeddings()(tokens)
        before, after = text[:, : self.place.start], text[:, self.place.stop :]
        embedded = torch.cat([before, clip, after], 1)
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand(3, *tokens.shape)
        output = self.model.language_model(
            inputs_embeds=embedded, position_ids=positions, use_cache=False
        )
        return output.last_hidden_state

    def scores(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Raw scores (B, 3), read at the reward tokens."""
        places = (tokens[..., None] == self.reward.reward_tokens).int().argmax(1)  # (B, 3)
        states = hidden.gather(1, places[..., None].expand(-1, -1, hidden.shape[-1]))
        return (states @ self.head.T)[..., 0]


def attend_within_frames(
    attention: nn.Module,
    patches: int,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    **_: Any,
) -> Tensor:
    """The attention of Qwen2-VL's vision tower for frames of as many patches: one product, not one for each frame."""
    q, k, v = attention.qkv(hidden_states).unflatten(-1, (3, attention.num_heads, -1)).unbind(1)
    q, k = apply_rotary_pos_emb_vision(q, k, *position_embeddings)
    q, k, v = (part.unflatten(0, (-1, patches)).transpose(1, 2) for part in (q, k, v))
    output = F.scaled_dot_product_attention(q, k, v)
    return attention.proj(output.transpose(1, 2).flatten(2).flatten(0, 1))


class Texts:
    """Token sequences of prompts around a clip, padded to one length."""

    def __init__(
        self,
        reward: VideoAlign,
        prompts: Sequence[str],
        grid: tuple[int, int, int],
        device: torch.device,
    ) -> None:
        different = list(dict.fromkeys(prompts))
        rows = [reward._tokens(prompt, grid) for prompt in tqdm(different, "tokens", mininterval=5)]
        padding = reward.tokenizer.convert_tokens_to_ids(PAD_TOKEN)
        self.tokens = pad_sequence(rows, batch_first=True, padding_value=padding).to(device)
        places = {prompt: place for place, prompt in enumerate(different)}
        self.rows = torch.tensor([places[prompt] for prompt in prompts], device=device)

    def __getitem__(self, index: Tensor) -> Tensor:
        return self.tokens[self.rows[index]]


def caption_loss(judge: Judge, tokens: Tensor, hidden: Tensor) -> Tensor:
    """Cross-entropy of the tokens between the marks of MQ and TA, the prompt, by the tied embedding table."""
    _, mq_token, ta_token = judge.reward.reward_tokens.unbind()
    begin = (tokens == mq_token).int().argmax(1, keepdim=True)
    end = (tokens == ta_token).int().argmax(1, keepdim=True)
    place = torch.arange(1, tokens.shape[1], device=tokens.device)
    targets = torch.where((place > begin) & (place < end), tokens[:, 1:], IGNORED)
    logits = hidden[:, :-1] @ judge.model.get_input_embeddings().weight.T
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def optimize(
    judge: Judge,
    steps: int,
    lr: float,
    draw: Callable[[], Batch],
    loss_of: Callable[..., Tensor],
    name: str,
    watch: Callable[[], str],
    every: int = 1000,
) -> None:
    """The package's loop on all weights and batches of one shape; what `watch` says is printed every so many steps."""

    def gradients(*batch: Tensor) -> Tensor:
        loss = loss_of(*batch)
        loss.backward()
        return loss

    def after_step(number: int, loss: Tensor) -> None:
        if number % every == 0 or number == steps:
            tqdm.write(f"{name} {number}: loss {loss.item():.4f} {watch()}")

    training.train(
        dict(judge.named_parameters()),
        steps=steps,
        lr=lr,
        draw=lambda number: draw(),
        gradients=gradients,
        name=name,
        after_step=after_step,
        record=Recorder(judge.head.device),
    )


@torch.no_grad()
def pair_scores(judge: Judge, patches: Tensor, texts: Texts, pairs: Pairs) -> Tensor:
    """Raw scores (P, 2, 3) of both clips of each pair."""
    device = patches.device
    parts = []
    for rows in torch.arange(len(pairs.prompts), device=device).split(256):
        clips = pairs.clips.to(device)[rows].flatten()
        tokens = texts[rows].repeat_interleave(2, 0)
        scores = judge.scores(tokens, judge(tokens, patches[clips]))
        parts.append(scores.unflatten(0, (-1, 2)))
    return torch.cat(parts)


def accuracies(scores: Tensor, pairs: Pairs) -> dict[str, float]:
    """Share of the pairs that are ordered as the noise-free truth says, by score."""
    difference = (scores[:, 0] - scores[:, 1]).cpu()
    return {
        name: accuracy(difference[:, i], pairs.truth[:, i], 0.05) for i, name in enumerate(SCORES)
    }


def write_weights(folder: Path, model: Qwen2VLModel, head: Tensor) -> None:
    """Write the weights under the published names, in half precision."""
    weights = published_weights(model, torch.float16)
    weights[HEAD] = head.detach().half().cpu().contiguous()
    save_file(weights, folder / CHECKPOINT / "model.safetensors")


def write_scale(folder: Path, scores: Tensor) -> None:
    """Make the scores (N, 3) of these clips z-scores."""
    scale = {}
    for kind, values in {"mean": scores.mean(0), "std": scores.std(0)}.items():
        for name, value in zip(SCORES, values.tolist(), strict=True):
            scale[f"{name}_{kind}"] = value
    file = folder / "model_config.json"
    config = json.loads(file.read_text()) | {"inference_config": scale}
    file.write_text(json.dumps(config, indent=1) + "\n")


def describe(folder: Path, args: argparse.Namespace, seconds: int, device: torch.device) -> None:
    """Write training.json: how the folder was made."""
    command = "python -m research.tiny.videoreward.learn"
    for flag, value in vars(args).items():
        if flag not in ("model", "output", "device") and value != arguments().get_default(flag):
            command += f" --{flag} {value}"
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    record = {"command": command, "seconds": seconds, "device": name, "torch": torch.__version__}
    (folder / "training.json").write_text(json.dumps(record, indent=1) + "\n")


def new_reward(folder: Path, seed: int, pixels: int) -> None:
    """Write a folder with random weights. pixels: least size of a frame, to which clips are enlarged."""
    words = [*vocabulary(), *re.findall(r"[A-Za-z]+", TEMPLATE)]
    settings = {
        "data_config": {
            "fps": 2.0,
            "max_frame_pixels": 200704,
            "min_frame_pixels": pixels,
            "num_frames": FRAMES,
        },
        "model_config": {"output_dim": 1},
        "peft_lora_config": {"lora_enable": False, "lora_r": 1, "lora_alpha": 1},
        "inference_config": unit_scale(),
    }
    write_folder(
        folder, text=TEXT, vision=VISION, words=words, template=TEMPLATE, settings=settings
    )
    torch.manual_seed(seed)
    config = Qwen2VLConfig.from_pretrained(folder / "base_config")
    model = Qwen2VLModel(config)
    head = 0.02 * torch.randn(1, config.text_config.hidden_size)
    write_weights(folder, model, head)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--model", type=Path, default=Path("assets/tiny"), help="its VAE and samples are judged too"
    )
    add("--output", type=Path, default=Path("assets/tiny/VideoReward"), help="folder to write")
    add("--seed", type=int, default=0)
    add("--clips", type=int, default=16384, help="rendered, damaged and reconstructed clips, each")
    add("--sampled", type=int, default=4096, help="clips sampled from the model")
    add("--pairs", type=int, default=524288, help="pairs of clips that annotators label")
    add("--pixels", type=int, default=56 * 56, help="least size of a frame")
    add("--caption_steps", type=int, default=4000)
    add("--steps", type=int, default=9000, help="steps on pairs")
    add("--batch", type=int, default=128, help="pairs per step")
    add("--lr", type=float, default=1e-3, help="learning rate for captions")
    add("--pair_lr", type=float, default=4e-4, help="for pairs, whose labels tell far less")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser


def main(command_line: Sequence[str] | None = None) -> None:
    args = arguments().parse_args(command_line)
    begin = time.time()
    device = torch.device(args.device)
    torch.backends.cuda.matmul.allow_tf32 = True
    backbone = open_backbone(args.model, device)
    counts = dict.fromkeys(SOURCES, args.clips) | {"sampled": args.sampled}
    pool = build_pool(backbone, counts, 2 * args.seed, device)
    held = build_pool(backbone, dict.fromkeys(counts, HELD_CLIPS), 2 * args.seed + 1, device)
    seconds = time.time() - begin
    print(f"{len(pool.clips)} + {len(held.clips)} clips after {seconds:.0f} s", flush=True)
    with tempfile.TemporaryDirectory() as draft:
        folder = Path(draft) / "VideoReward"
        new_reward(folder, args.seed, args.pixels)
        judge = Judge(folder, device)
        scores = train(judge, pool, held, backbone.sampling.fps, args)
        write_weights(folder, judge.model, judge.head)
        write_scale(folder, scores.flatten(0, 1))
        describe(folder, args, round(time.time() - begin), device)
        shutil.move(folder, args.output)
    print(f"{args.output} after {time.time() - begin:.0f} s")


def train(judge: Judge, pool: Pool, held: Pool, fps: float, args: argparse.Namespace) -> Tensor:
    """Train on captions, then on pairs; returns the scores (P, 2, 3) of the held-out pairs."""
    device = pool.clips.device
    generator = torch.Generator(device).manual_seed(args.seed)
    patches, grid = judge.patches(pool, fps)
    held_patches, _ = judge.patches(held, fps)
    pairs = draw_pairs(pool, args.pairs, args.seed)
    held_pairs = draw_pairs(held, HELD_PAIRS, args.seed + 1)
    clips = pairs.clips.to(device)
    labels = pairs.labels.to(device)
    texts = Texts(judge.reward, pairs.prompts, grid, device)
    held_texts = Texts(judge.reward, held_pairs.prompts, grid, device)
    captions = Texts(judge.reward, captions_of(pool, args.seed), grid, device)

    def caption_batch() -> Batch:
        rows = torch.randint(len(pool.clips), (2 * args.batch,), generator=generator, device=device)
        return captions[rows], patches[rows]

    def caption_batch_loss(tokens: Tensor, patches: Tensor) -> Tensor:
        return caption_loss(judge, tokens, judge(tokens, patches))

    def pair_batch() -> Batch:
        rows = torch.randint(len(pairs.prompts), (args.batch,), generator=generator, device=device)
        return texts[rows].repeat_interleave(2, 0), patches[clips[rows].flatten()], labels[rows]

    def pair_loss(tokens: Tensor, patches: Tensor, labels: Tensor) -> Tensor:
        scores = judge.scores(tokens, judge(tokens, patches)).unflatten(0, (-1, 2))
        return tie_losses(scores[:, 0] - scores[:, 1], labels).mean()

    def held_scores() -> Tensor:
        return pair_scores(judge, held_patches, held_texts, held_pairs)

    def watch() -> str:
        shares = accuracies(held_scores(), held_pairs)
        return ", ".join(f"{name} {value:.3f}" for name, value in shares.items())

    optimize(
        judge,
        args.caption_steps,
        args.lr,
        draw=caption_batch,
        loss_of=caption_batch_loss,
        name="captions",
        watch=lambda: "",
    )
    optimize(
        judge,
        args.steps,
        args.pair_lr,
        draw=pair_batch,
        loss_of=pair_loss,
        name="pairs",
        watch=watch,
    )
    return held_scores()


if __name__ == "__main__":
    main()
