"""Train the embedded reward: a small Qwen2-VL in VideoAlign's folder format that judges clips of the shapes world.

    python -m research.tiny.videoreward.learn --model assets/tiny --output assets/tiny/VideoReward    (one GPU, minutes)

As its large relative it first learns to caption clips, and then to agree with annotators about pairs of them, by
Bradley-Terry with ties. What it is measured by is in its card (`card.py`). Everything follows from --seed.

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

from research.tiny.training import Recorder, forget, warm_cosine
from research.tiny.videoreward.folder import CHECKPOINT, unit_scale, write_folder
from research.tiny.videoreward.pairs import (
    SCORES,
    Pairs,
    accuracy,
    captions_of,
    draw_pairs,
    label_losses,
)
from research.tiny.videoreward.pool import SOURCES, Pool, build_pool
from sage_grpo.models.registry import open_backbone
from sage_grpo.rewards.videoalign.reward import PAD_TOKEN, VIDEO_TOKEN, VideoAlign
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
HELD_CLIPS, HELD_PAIRS = 512, 2048  # per source, and in all
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
        found = []
        for part in pool.clips.split(1024):
            rows, grid = self.reward._patches(part, fps)
            found.append(rows.half())
        self._prepare(found[0][:1], grid)
        return torch.cat(found), grid

    @torch.no_grad()
    def _prepare(self, patches: Tensor, grid: tuple[int, int, int]) -> None:
        """Find what is the same for all clips of this grid: the angles of the vision tower, and where the clip stands.

        With it a forward needs no look at the numbers, and a GPU can record it.
        """
        visual, seen = self.model.visual, {}
        hook = visual.blocks[0].register_forward_pre_hook(
            lambda _, __, named: seen.update(named), with_kwargs=True
        )
        visual(patches.flatten(0, 1).float(), grid_thw=torch.tensor([grid], device=patches.device))
        hook.remove()
        self.angles = tuple(part.clone() for part in seen["position_embeddings"])
        tokens = self.reward._tokens("", grid)
        places = (
            (tokens == self.reward.tokenizer.convert_tokens_to_ids(VIDEO_TOKEN)).nonzero().flatten()
        )
        self.place = slice(int(places[0]), int(places[-1]) + 1)
        for block in visual.blocks:
            block.attn.forward = partial(attend_within_frames, block.attn, grid[1] * grid[2])

    def forward(self, tokens: Tensor, patches: Tensor) -> Tensor:
        """(B, L, D) final hidden states: the forward of Qwen2-VL for clips of one grid."""
        visual, angles = (
            self.model.visual,
            tuple(part.repeat(len(tokens), 1) for part in self.angles),
        )
        x = visual.patch_embed(patches.flatten(0, 1).float())
        for block in visual.blocks:
            x = block(x, cu_seqlens=None, position_embeddings=angles)
        embedded, clip = (
            self.model.get_input_embeddings()(tokens),
            visual.merger(x).unflatten(0, (len(tokens), -1)),
        )
        embedded = torch.cat(
            [embedded[:, : self.place.start], clip, embedded[:, self.place.stop :]], 1
        )
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand(3, *tokens.shape)
        return self.model.language_model(
            inputs_embeds=embedded, position_ids=positions, use_cache=False
        ).last_hidden_state

    def scores(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """(B, 3)."""
        places = (tokens[..., None] == self.reward.reward_tokens).int().argmax(1)
        return (hidden.gather(1, places[..., None].expand(-1, -1, hidden.shape[-1])) @ self.head.T)[
            ..., 0
        ]


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
    found = F.scaled_dot_product_attention(q, k, v)
    return attention.proj(found.transpose(1, 2).flatten(2).flatten(0, 1))


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
    after, before = (
        (tokens == token).int().argmax(1, keepdim=True)
        for token in judge.reward.reward_tokens[1:].unbind()
    )
    place = torch.arange(1, tokens.shape[1], device=tokens.device)
    wanted = torch.where((place > after) & (place < before), tokens[:, 1:], IGNORED)
    logits = hidden[:, :-1] @ judge.model.get_input_embeddings().weight.T
    return F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=IGNORED)


Batch = tuple[Tensor, ...]  # tokens, patches, and what else the loss needs


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
    """AdamW on batches of one shape; `watch` is shown every so many steps."""
    buffers, rate = (
        tuple(part.clone() for part in draw()),
        torch.zeros((), device=judge.head.device),
    )
    optimizer = torch.optim.AdamW(
        judge.parameters(), rate, betas=(0.9, 0.98), weight_decay=0.05, capturable=rate.is_cuda
    )

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(*buffers)
        loss.backward()
        nn.utils.clip_grad_norm_(judge.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    replay = Recorder(rate.device)(step)
    forget(optimizer)
    for number in tqdm(range(1, steps + 1), name, unit="step", mininterval=5):
        rate.fill_(lr * warm_cosine(number - 1, steps))
        for mine, new in zip(buffers, draw(), strict=True):
            mine.copy_(new)
        loss = replay()
        if number % every == 0 or number == steps:
            tqdm.write(f"{name} {number}: loss {loss.item():.4f} {watch()}")


@torch.no_grad()
def pair_scores(judge: Judge, patches: Tensor, texts: Texts, pairs: Pairs) -> Tensor:
    """Raw scores (P, 2, 3) of both clips of each pair."""
    found = []
    for rows in torch.arange(len(pairs.prompts), device=patches.device).split(256):
        clips, tokens = (
            pairs.clips.to(patches.device)[rows].flatten(),
            texts[rows].repeat_interleave(2, 0),
        )
        found.append(judge.scores(tokens, judge(tokens, patches[clips])).unflatten(0, (-1, 2)))
    return torch.cat(found)


def accuracies(scores: Tensor, pairs: Pairs) -> dict[str, float]:
    """Share of the pairs that are ordered as the noise-free truth says, by score."""
    difference = (scores[:, 0] - scores[:, 1]).cpu()
    return {
        name: accuracy(difference[:, i], pairs.truth[:, i], 0.05) for i, name in enumerate(SCORES)
    }


def write_weights(folder: Path, model: Qwen2VLModel, head: Tensor) -> None:
    """The published names, in half precision."""
    named = {
        re.sub("^language_model", "model", name): value
        for name, value in model.state_dict().items()
    }
    tensors = {
        name: value.detach().half().cpu().contiguous()
        for name, value in (named | {"rm_head.weight": head}).items()
    }
    save_file(tensors, folder / CHECKPOINT / "model.safetensors")


def write_scale(folder: Path, scores: Tensor) -> None:
    """Make the scores (N, 3) of these clips z-scores."""
    file = folder / "model_config.json"
    kinds = {"mean": scores.mean(0).tolist(), "std": scores.std(0).tolist()}
    scale = {
        f"{name}_{kind}": values[i]
        for kind, values in kinds.items()
        for i, name in enumerate(SCORES)
    }
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"inference_config": scale}, indent=1) + "\n"
    )


def describe(folder: Path, args: argparse.Namespace, seconds: int, device: torch.device) -> None:
    """Write training.json: how the folder was made."""
    left_out = ("model", "output", "device")
    changed = {
        k: v for k, v in vars(args).items() if k not in left_out and v != arguments().get_default(k)
    }
    command = "python -m research.tiny.videoreward.learn" + "".join(
        f" --{key} {value}" for key, value in changed.items()
    )
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    record = {"command": command, "seconds": seconds, "device": name, "torch": torch.__version__}
    (folder / "training.json").write_text(json.dumps(record, indent=1) + "\n")


def new_reward(folder: Path, seed: int, pixels: int) -> None:
    """A folder with random weights. pixels: least size of a frame, to which clips are enlarged."""
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
    write_weights(
        folder, Qwen2VLModel(config), 0.02 * torch.randn(1, config.text_config.hidden_size)
    )


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, default=Path("assets/tiny"), help="its VAE and samples are judged too"
    )
    parser.add_argument("--output", type=Path, default=Path("assets/tiny/VideoReward"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--clips", type=int, default=16384, help="rendered, damaged and reconstructed clips, each"
    )
    parser.add_argument("--sampled", type=int, default=4096, help="clips sampled from the model")
    parser.add_argument("--pairs", type=int, default=524288)
    parser.add_argument("--pixels", type=int, default=56 * 56)
    parser.add_argument("--caption_steps", type=int, default=4000)
    parser.add_argument("--steps", type=int, default=9000)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-3, help="for captions")
    parser.add_argument(
        "--pair_lr", type=float, default=4e-4, help="for pairs, whose labels tell far less"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser


def main(words: Sequence[str] | None = None) -> None:
    args = arguments().parse_args(words)
    started, device = time.time(), torch.device(args.device)
    torch.backends.cuda.matmul.allow_tf32 = True
    backbone = open_backbone(args.model, device)
    counts = dict.fromkeys(SOURCES, args.clips) | {"sampled": args.sampled}
    pool = build_pool(backbone, counts, 2 * args.seed, device)
    held = build_pool(backbone, dict.fromkeys(counts, HELD_CLIPS), 2 * args.seed + 1, device)
    print(
        f"{len(pool.clips)} + {len(held.clips)} clips after {time.time() - started:.0f} s",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as draft:
        folder = Path(draft) / "VideoReward"
        new_reward(folder, args.seed, args.pixels)
        judge = Judge(folder, device)
        scores = train(judge, pool, held, backbone.sampling.fps, args)
        write_weights(folder, judge.model, judge.head)
        write_scale(folder, scores.flatten(0, 1))
        describe(folder, args, round(time.time() - started), device)
        shutil.move(folder, args.output)
    print(f"{args.output} after {time.time() - started:.0f} s")


def train(judge: Judge, pool: Pool, held: Pool, fps: float, args: argparse.Namespace) -> Tensor:
    """Captions first, then pairs; returns the scores (P, 2, 3) of the held-out pairs."""
    device = pool.clips.device
    generator = torch.Generator(device).manual_seed(args.seed)
    (patches, grid), (held_patches, _) = judge.patches(pool, fps), judge.patches(held, fps)
    pairs, held_pairs = (
        draw_pairs(pool, args.pairs, args.seed),
        draw_pairs(held, HELD_PAIRS, args.seed + 1),
    )
    texts, held_texts = (Texts(judge.reward, p.prompts, grid, device) for p in (pairs, held_pairs))
    captions = Texts(judge.reward, captions_of(pool, args.seed), grid, device)

    def caption_batch() -> Batch:
        rows = torch.randint(len(pool.clips), (2 * args.batch,), generator=generator, device=device)
        return captions[rows], patches[rows]

    def pair_batch() -> Batch:
        rows = torch.randint(len(pairs.prompts), (args.batch,), generator=generator, device=device)
        return texts[rows].repeat_interleave(2, 0), patches[clips[rows].flatten()], labels[rows]

    def pair_loss(tokens: Tensor, patches: Tensor, labels: Tensor) -> Tensor:
        scores = judge.scores(tokens, judge(tokens, patches)).unflatten(0, (-1, 2))
        return label_losses(scores[:, 0] - scores[:, 1], labels).mean()

    def held_scores() -> Tensor:
        return pair_scores(judge, held_patches, held_texts, held_pairs)

    def watch() -> str:
        found = accuracies(held_scores(), held_pairs)
        return ", ".join(f"{name} {value:.3f}" for name, value in found.items())

    clips, labels = pairs.clips.to(device), pairs.labels.to(device)
    caption = lambda tokens, patches: caption_loss(judge, tokens, judge(tokens, patches))  # noqa: E731
    optimize(judge, args.caption_steps, args.lr, caption_batch, caption, "captions", lambda: "")
    optimize(judge, args.steps, args.pair_lr, pair_batch, pair_loss, "pairs", watch)
    return held_scores()


if __name__ == "__main__":
    main()
