"""HunyuanVideo-1.5's transformer without padding, masks or device syncs.

The stock forward pads every text to a fixed length and builds a square mask in each layer. A batch that shares one
prompt (a GRPO group) needs neither, because its text has a single length. Parameters and their names are the stock
ones, so `from_pretrained` and LoRA files work unchanged.

Shapes: B clips of one prompt, C latent channels, (T, Y, X) latent frames, rows and columns, N = T*Y*X video tokens
(patch 1), L text tokens, M glyph tokens, I image tokens, K = I + M + L context tokens, H heads of E, D = H*E. Under
sequence parallelism the blocks see this rank's share of N and K.
"""

import functools

import torch
from diffusers import HunyuanVideo15Transformer3DModel
from diffusers.models.attention_processor import Attention
from diffusers.models.embeddings import apply_rotary_emb
from einops import rearrange
from torch import Tensor

from sage_grpo.models.attention import best_attention
from sage_grpo.models.denoiser import StockDenoiser
from sage_grpo.parallel.ulysses import Attend, Shares

# Rows of `cond_type_embed`.
TEXT = 0
GLYPH = 1
IMAGE = 2


class PackedAttention:
    """Attention processor of a double-stream block: video and context tokens attend to each other, all valid."""

    def __call__(
        self,
        attn: Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Attend,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Video (B, N, D) and context (B or 1, K, D) -> their attention outputs (B, N, D) and (B, K, D).

        The stock block passes `attention_mask` through unread. No mask is needed, so it carries the attention function.
        """
        video_query, video_key, video_value = self._heads(
            hidden_states,
            attn.heads,
            projections=(attn.to_q, attn.to_k, attn.to_v),
            norms=(attn.norm_q, attn.norm_k),
        )
        video_query = apply_rotary_emb(video_query, image_rotary_emb, sequence_dim=1)
        video_key = apply_rotary_emb(video_key, image_rotary_emb, sequence_dim=1)
        video = (video_query, video_key, video_value)
        context = self._heads(
            encoder_hidden_states,
            attn.heads,
            projections=(attn.add_q_proj, attn.add_k_proj, attn.add_v_proj),
            norms=(attn.norm_added_q, attn.norm_added_k),
        )

        # A context still shared by the group is expanded here, the last point where that is exact.
        batch, num_video = hidden_states.shape[:2]
        query, key, value = (
            torch.cat([v, c.expand(batch, -1, -1, -1)], dim=1)
            for v, c in zip(video, context, strict=True)
        )
        out = attention_mask(query, key, value).flatten(2)

        video_out = attn.to_out[1](attn.to_out[0](out[:, :num_video]))
        context_out = attn.to_add_out(out[:, num_video:])
        return video_out, context_out

    @staticmethod
    def _heads(
        tokens: Tensor, heads: int, projections: tuple, norms: tuple
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens (B, S, D) -> normalized query, normalized key, value, each (B, S, H, E)."""
        query, key, value = (project(tokens).unflatten(2, (heads, -1)) for project in projections)
        norm_query, norm_key = norms
        return norm_query(query), norm_key(key), value


class PackedTransformer(StockDenoiser, HunyuanVideo15Transformer3DModel):
    """The stock model with a packed forward for clips that share one prompt."""

    stock = HunyuanVideo15Transformer3DModel
    varying = (1, 1)  # tokens of the context
    unseen: tuple[str, ...] = ("image_embedder",)  # text-to-video has no image tokens

    # `from_pretrained` reads the accepted config keys from the signature.
    @functools.wraps(HunyuanVideo15Transformer3DModel.__init__)
    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        for block in self.all_blocks:
            block.attn.set_processor(PackedAttention())

    @property
    def never_trained(self) -> tuple[str, ...]:
        """What the task does not use. The context that leaves the last block is dropped, so its queries are unused."""
        last = f"{self.block_list}.{len(self.all_blocks) - 1}"
        unread = ("attn.add_q_proj", "attn.norm_added_q", "attn.to_add_out", "ff_context")
        return (*self.unseen, *(f"{last}.{name}" for name in unread))

    def forward(
        self, hidden_states: Tensor, timestep: Tensor, text: Tensor, glyph: Tensor, *image: Tensor
    ) -> Tensor:
        """Velocity (B, C, T, Y, X), in the dtype of the input.

        hidden_states: (B, in_channels, T, Y, X), latents with condition and mask channels.
        timestep: fp32, 1000 * sigma; (1,) if the clips share it, which is cheaper, else (B,).
        text: (1, L, text_dim) valid prompt tokens; glyph: (1, M, glyph_dim), M = 0 without quoted text.
        image: (1, I, image_dim), only of image-to-video. Where clips have requests of their own, B instead of 1.
        """
        temb = self._time_embedding(timestep, hidden_states.dtype)
        video = self.x_embedder(hidden_states)
        context = self._context(timestep, text, glyph, *image)

        shares = Shares(
            video.shape[1], context.shape[1], best_attention(video), self.sequence_group
        )
        rope = tuple(shares.own_video(table, dim=0) for table in self.rope(hidden_states))
        video = shares.own_video(video)
        context = shares.own_context(context)
        for block in self.all_blocks:
            video, context = self.run_block(block, (video, context, temb), shares.attend, rope)

        tokens = shares.join_video(self.proj_out(self.norm_out(video, temb)))
        c = self.config
        velocity = rearrange(
            tokens,
            "b (t y x) (c pt py px) -> b c (t pt) (y py) (x px)",
            y=hidden_states.shape[3] // c.patch_size,
            x=hidden_states.shape[4] // c.patch_size,
            pt=c.patch_size_t,
            py=c.patch_size,
            px=c.patch_size,
        )
        return velocity.clone(memory_format=torch.contiguous_format)  # FSDP does not accept views

    def _time_embedding(self, timestep: Tensor, dtype: torch.dtype) -> Tensor:
        """(1 or B,) -> (1 or B, D). The sinusoid stays fp32: bf16 cannot distinguish neighboring timesteps."""
        sinusoid = self.time_embed.time_proj(timestep.float())
        return self.time_embed.timestep_embedder(sinusoid.to(dtype))

    def _context(self, timestep: Tensor, text: Tensor, glyph: Tensor, *image: Tensor) -> Tensor:
        """Image, glyph and text tokens in the stock order, (1 or B, K, D).

        The batch is 1 unless the timesteps differ: then only the refiner's gates, and what follows them, are per clip.
        The glyph projection runs even for M = 0: under FSDP every rank must enter the same modules.
        """
        types = self.cond_type_embed.weight
        refined = self.context_embedder(text, timestep.float()) + types[TEXT]
        glyphs = self.context_embedder_2(glyph) + types[GLYPH]
        images = [self.image_embedder(tokens) + types[IMAGE] for tokens in image]

        batch = max(len(tokens) for tokens in (refined, *images))
        context = [tokens.expand(batch, -1, -1) for tokens in (*images, glyphs, refined)]
        return torch.cat(context, dim=1)
