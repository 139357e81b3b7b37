"""HunyuanVideo-1.5's transformer without padding, masks or device syncs.

The stock forward pads every text to a fixed length and builds a square mask in each layer. A batch that shares one
prompt (a GRPO group) needs neither: its text has one length, so the padding is simply not there. Parameters and their
names are the stock ones, hence `from_pretrained` and LoRA files work unchanged.

Shapes: B clips of one prompt, C latent channels, (T, Y, X) latent frames and rows and columns, N = T*Y*X video tokens
(patch 1), L text tokens, M glyph tokens, K = M + L context tokens, H heads of E, D = H*E. Under sequence parallelism
the blocks see this rank's share of the N and K.
"""

import functools
import json
import math

import torch
import torch.distributed as dist
from diffusers import HunyuanVideo15Transformer3DModel
from diffusers.models.attention_processor import Attention
from diffusers.models.embeddings import apply_rotary_emb
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from sage_grpo.models.attention import KEPT, best_attention
from sage_grpo.parallel.ulysses import Attend, Shares

TEXT, GLYPH = 0, 1  # rows of `cond_type_embed`

Rope = tuple[Tensor, Tensor]


class PackedAttention:
    """Attention processor of a double-stream block: video and context tokens attend to each other, all valid."""

    def __call__(
        self,
        attn: Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Attend,
        image_rotary_emb: Rope | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Video (B, N, D) and context (B or 1, K, D) -> their attention outputs (B, N, D) and (B, K, D).

        The stock block hands `attention_mask` on unread. There is no mask here: it brings what lets tokens meet.
        """
        video = self._heads(attn, hidden_states, (attn.to_q, attn.to_k, attn.to_v), (attn.norm_q, attn.norm_k))
        video[:2] = [apply_rotary_emb(x, image_rotary_emb, sequence_dim=1) for x in video[:2]]
        context = self._heads(
            attn,
            encoder_hidden_states,
            (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj),
            (attn.norm_added_q, attn.norm_added_k),
        )
        batch, num_video = hidden_states.shape[:2]
        # A context that is still shared by the group is expanded here, the last point where that is exact.
        joint = [torch.cat([v, c.expand(batch, -1, -1, -1)], dim=1) for v, c in zip(video, context, strict=True)]
        out = attention_mask(*joint).flatten(2)
        video_out, context_out = out[:, :num_video], out[:, num_video:]
        return attn.to_out[1](attn.to_out[0](video_out)), attn.to_add_out(context_out)

    @staticmethod
    def _heads(attn: Attention, tokens: Tensor, projections: tuple, norms: tuple) -> list[Tensor]:
        """Tokens (B, S, D) -> normalised query, normalised key, value, each (B, S, H, E)."""
        query, key, value = (project(tokens).unflatten(2, (attn.heads, -1)) for project in projections)
        return [norms[0](query), norms[1](key), value]


class PackedTransformer(HunyuanVideo15Transformer3DModel):
    """The stock model with a packed forward for clips that share one prompt."""

    # `from_pretrained` reads the accepted config keys off the signature.
    @functools.wraps(HunyuanVideo15Transformer3DModel.__init__)
    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        for block in self.transformer_blocks:
            block.attn.set_processor(PackedAttention())
        self.num_recomputed, self.compiled, self.trained, self.sequence_group = 0, False, False, None

    def split_sequence(self, group: dist.ProcessGroup | None) -> None:
        """Spread the tokens of every forward over the ranks of a group; each of them gets the whole velocity."""
        heads = self.config.num_attention_heads
        if group is not None and heads % dist.get_world_size(group):
            raise ValueError(f"sp_size is {dist.get_world_size(group)}; it must divide the model's {heads} heads")
        self.sequence_group = group

    def prepare_blocks(self, recomputed: float = 0.0, keep_attention: bool = False, compiled: bool = False) -> None:
        """Once, when it is known what is trained: gradient checkpointing of a share of the blocks, the first ones, and
        compilation of all of them.

        keep_attention: attention, the dearest part, is kept and not computed again in the backward pass.
        """
        self.num_recomputed, self.compiled = math.ceil(recomputed * len(self.transformer_blocks)), compiled
        self.trained = any(parameter.requires_grad for parameter in self.parameters())
        if compiled:  # blocks with other adapters, and lengths of text, are graphs of their own; too many are an error
            torch._dynamo.config.recompile_limit = 64
            torch._dynamo.config.fail_on_recompile_limit_hit = True
        contexts = functools.partial(create_selective_checkpoint_contexts, _keep_attention)
        words = {"use_reentrant": False, "preserve_rng_state": False} | (
            {"context_fn": contexts} if keep_attention else {}
        )
        for number, block in enumerate(self.transformer_blocks):
            if number < self.num_recomputed:
                block.forward = functools.partial(checkpoint, block.forward, **words)
            if compiled:
                block.forward = torch.compile(block.forward)

    def forward(self, hidden_states: Tensor, timestep: Tensor, text: Tensor, glyph: Tensor) -> Tensor:
        """Velocity (B, C, T, Y, X) in the dtype of the input.

        hidden_states: (B, in_channels, T, Y, X), latents with their condition and mask channels.
        timestep: fp32, 1000 * sigma; (1,) where the clips share it, which is cheaper, else (B,).
        text: (1, L, text_dim) valid tokens of the prompt; glyph: (1, M, glyph_dim), M = 0 without quoted text.
        """
        temb = self._time_embedding(timestep, hidden_states.dtype)
        video, context = self.x_embedder(hidden_states), self._context(timestep, text, glyph)
        shares = Shares.of(video.shape[1], context.shape[1], best_attention(video), self.sequence_group)
        rope = tuple(shares.own_video(table, dim=0) for table in self.rope(hidden_states))
        video, context = shares.own_video(video), shares.own_context(context)
        for block in self.transformer_blocks:
            video, context = self._run(block, video, context, temb, shares.attend, rope)
        velocity = shares.join_video(self.proj_out(self.norm_out(video, temb)))
        return self._unpatch(velocity, hidden_states.shape[2:])

    def _run(
        self, block: nn.Module, video: Tensor, context: Tensor, temb: Tensor, attend: Attend, rope: Rope
    ) -> tuple[Tensor, Tensor]:
        """One block; a compiled one that is trained as one graph for rollout and training alike.

        The compiler fuses a forward without gradients differently, and it would round differently. So such blocks
        always run with gradients, and where none are wanted their history is dropped. All blocks see inputs of one
        kind, hence share a graph.
        """
        if not self.compiled:
            return block(video, context, temb, attend, rope)
        wanted = torch.is_grad_enabled()
        if self.trained:
            inputs = (video, context, temb)
            video, context, temb = (x if x.requires_grad else x.detach().requires_grad_() for x in inputs)
        torch._dynamo.maybe_mark_dynamic(context, 1)  # prompts differ in length; all else is fixed in a run
        with torch.set_grad_enabled(wanted or self.trained):
            video, context = block(video, context, temb, attend, rope)
        return (video, context) if wanted else (video.detach(), context.detach())

    def to_json_string(self) -> str:
        """The config as the stock class writes it, so that saved folders load without this package."""
        config = json.loads(super().to_json_string())
        config["_class_name"] = HunyuanVideo15Transformer3DModel.__name__
        return json.dumps(config, indent=2, sort_keys=True) + "\n"

    def _time_embedding(self, timestep: Tensor, dtype: torch.dtype) -> Tensor:
        """(1 or B,) -> (1 or B, D). The sinusoid stays fp32: bf16 cannot tell neighbouring timesteps apart."""
        sinusoid = self.time_embed.time_proj(timestep.float())
        return self.time_embed.timestep_embedder(sinusoid.to(dtype))

    def _context(self, timestep: Tensor, text: Tensor, glyph: Tensor) -> Tensor:
        """Glyph and text tokens in the stock order, (1 or B, K, D).

        The batch is 1 unless the timesteps differ: then only the refiner's gates, and what follows them, are per clip.
        The glyph projection runs for M = 0 too: under FSDP every rank must enter the same modules.
        """
        refined = self.context_embedder(text, timestep.float()) + self.cond_type_embed.weight[TEXT]
        glyphs = self.context_embedder_2(glyph) + self.cond_type_embed.weight[GLYPH]
        return torch.cat([glyphs.expand(len(refined), -1, -1), refined], dim=1)

    def _unpatch(self, tokens: Tensor, grid: torch.Size) -> Tensor:
        """Output tokens (B, N, C * patch volume) -> (B, C, T, Y, X), in memory of its own: FSDP wants no views."""
        patch = (self.config.patch_size_t, self.config.patch_size, self.config.patch_size)
        counts = [size // p for size, p in zip(grid, patch, strict=True)]
        blocks = tokens.unflatten(1, counts).unflatten(-1, (-1, *patch))  # (B, t, y, x, C, pt, py, px)
        velocity = blocks.permute(0, 4, 1, 5, 2, 6, 3, 7).reshape(len(tokens), -1, *grid)
        return velocity.clone(memory_format=torch.contiguous_format)


def _keep_attention(ctx: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
