"""Wan's transformer with this package's attention, sequence parallelism and way to run blocks.

Parameters, their names and the blocks are the stock ones, so `from_pretrained` and LoRA files work unchanged. Norms and
modulation are computed in fp32, as there; the parameters that stock loads in fp32 have the dtype of all others.

The first latent frame may have a timestep of its own. Stock then modulates every token by a row of its own, 6 N D
numbers; only two of the rows differ, and here there are no others.

Shapes: B clips, C latent channels, (T, Y, X) latent frames, rows and columns, N = T*Y*X / patch volume video tokens, L
text tokens, H heads of E, D = H*E. Under sequence parallelism the blocks see this rank's share of N and all of L.
"""

import functools
from collections.abc import Callable

import torch
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import (
    WanAttention,
    WanRotaryPosEmbed,
    WanTransformerBlock,
)
from einops import rearrange
from torch import Tensor

from sage_grpo.models.attention import attention, best_attention
from sage_grpo.models.denoiser import StockDenoiser
from sage_grpo.parallel.ulysses import Attend, Shares

# cos and sin (1, N, 1, E/2), attention over all tokens, and how many of the N are of the first frame
Rope = tuple[Tensor, Tensor, Attend, int]


def attend(
    attn: WanAttention, video: Tensor, text: Tensor | None, mask: None, rope: Rope | None
) -> Tensor:
    """Processor of both attentions of a block: video (B, N, D) attends to itself, or to text (B or 1, L, D).

    The block passes `rope` to self-attention alone, so it also carries the attention function.
    """
    source = video if text is None else text
    query = attn.norm_q(attn.to_q(video)).unflatten(2, (attn.heads, -1))
    key = attn.norm_k(attn.to_k(source)).unflatten(2, (attn.heads, -1))
    value = attn.to_v(source).unflatten(2, (attn.heads, -1))

    if rope is None:  # cross-attention, to a text that the group may still share
        key = key.expand(len(query), -1, -1, -1)
        value = value.expand(len(query), -1, -1, -1)
        out = attention(query, key, value)
    else:
        cos, sin, attend_to_all, _ = rope
        out = attend_to_all(rotated(query, cos, sin), rotated(key, cos, sin), value)
    return attn.to_out[0](out.flatten(2))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighboring channels of (B, N, H, E) as pairs."""
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2).type_as(x)


@functools.lru_cache
def rope_of(
    width: int, patch: tuple[int, ...], length: int, device: torch.device
) -> WanRotaryPosEmbed:
    """The stock module that computes rotary tables."""
    with torch.device("cpu"):
        return WanRotaryPosEmbed(width, patch, length).to(device)


def modulated(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return x * (1 + scale) + shift


def gated(x: Tensor, change: Tensor, gate: Tensor) -> Tensor:
    return (x.float() + change * gate).type_as(x)


def by_frame(
    combine: Callable[..., Tensor],
    num_first: int,
    tokens: tuple[Tensor, ...],
    rows: tuple[Tensor, ...],
) -> Tensor:
    """Combine tokens (B, N, D) with the rows (B or 1, 2, D) of their frame; row 0 is for the first `num_first`."""
    first = combine(*(x[:, :num_first] for x in tokens), *(row[:, :1] for row in rows))
    others = combine(*(x[:, num_first:] for x in tokens), *(row[:, 1:] for row in rows))
    return torch.cat([first, others], dim=1)


class Block(WanTransformerBlock):
    """The stock block, which takes modulations for the first frame and for the others as two rows."""

    def forward(self, video: Tensor, text: Tensor, modulation: Tensor, rope: Rope) -> Tensor:
        """Video (B, N, D) after text (1 or B, L, D); modulation: (1 or B, 6, D), or (1 or B, 2, 6, D) by frame."""
        if modulation.ndim == 3:
            return super().forward(video, text, modulation, rope)

        *_, num_first = rope
        table = self.scale_shift_table[:, None] + modulation.float()
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = table.unbind(2)

        normed = self.norm1(video.float())
        normed = by_frame(modulated, num_first, (normed,), (scale, shift)).type_as(video)
        change = self.attn1(normed, None, None, rope)
        video = by_frame(gated, num_first, (video, change), (gate,))

        normed = self.norm2(video.float()).type_as(video)
        video = video + self.attn2(normed, text, None, None)

        normed = self.norm3(video.float())
        normed = by_frame(modulated, num_first, (normed,), (mlp_scale, mlp_shift)).type_as(video)
        change = self.ffn(normed).float()
        return by_frame(gated, num_first, (video, change), (mlp_gate,))


class WanTransformer(StockDenoiser, WanTransformer3DModel):
    """The stock model without image encoder."""

    stock = WanTransformer3DModel
    block_list = "blocks"

    # `from_pretrained` reads the accepted config keys from the signature.
    @functools.wraps(WanTransformer3DModel.__init__)
    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        # Its tables are computed, not stored: those of a model on the meta device would never be filled.
        del self.rope
        for block in self.all_blocks:
            block.__class__ = Block
            block.attn1.set_processor(attend)
            block.attn2.set_processor(attend)

    def forward(self, hidden_states: Tensor, timestep: Tensor, text: Tensor) -> Tensor:
        """Velocity (B, C, T, Y, X) of latents of that shape, in their dtype.

        timestep: fp32, 1000 * sigma; (1,) if the clips share it, which is cheaper, else (B,). Of shape (1 or B, 2),
            that of the first latent frame and that of the others.
        text: (1 or B, L, text_dim), padded with zeros.
        """
        c = self.config
        video = self.patch_embedding(hidden_states).flatten(2).transpose(1, 2).contiguous()
        has_first = timestep.ndim == 2
        temb, modulation, text, _ = self.condition_embedder(
            timestep.flatten(), text, timestep_seq_len=2 if has_first else None
        )
        modulation = modulation.unflatten(-1, (6, -1))

        num_tokens = video.shape[1]
        shares = Shares(num_tokens, 0, best_attention(video), self.sequence_group)
        num_first = shares.own_first(num_tokens // hidden_states.shape[2])
        video = shares.own_video(video)
        rope_module = rope_of(
            c.attention_head_dim, tuple(c.patch_size), c.rope_max_seq_len, video.device
        )
        # tables (1, N, 1, E) that hold every number twice
        cos, sin = (shares.own_video(table) for table in rope_module(hidden_states))
        rope = (cos[..., 0::2].contiguous(), sin[..., 1::2].contiguous(), shares.attend, num_first)
        for block in self.all_blocks:
            video = self.run_block(block, (video, text, modulation), rope)

        normed = self.norm_out(video.float())
        if has_first:
            table = self.scale_shift_table[:, None] + temb[:, :, None]
            shift, scale = table.unbind(2)
            video = by_frame(modulated, num_first, (normed,), (scale, shift)).type_as(video)
        else:
            shift, scale = (self.scale_shift_table + temb[:, None]).chunk(2, dim=1)
            video = modulated(normed, scale, shift).type_as(video)
        tokens = shares.join_video(self.proj_out(video))
        _, patch_rows, patch_columns = c.patch_size
        velocity = rearrange(
            tokens,
            "b (t y x) (py px c) -> b c t (y py) (x px)",
            y=hidden_states.shape[3] // patch_rows,
            x=hidden_states.shape[4] // patch_columns,
            py=patch_rows,
            px=patch_columns,
        )
        return velocity.clone(memory_format=torch.contiguous_format)  # FSDP does not accept views
