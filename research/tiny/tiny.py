"""A tiny, untrained HunyuanVideo-1.5: every class is the real one, every size is small, nothing is downloaded.

The tokenizer learns its merges from the caption words and from the system message of the stock pipeline, so each word
is one token and the chat prefix is 108 tokens, as in the full-size model. The stock pipeline therefore works without
changes: `HunyuanVideo15Pipeline.from_pretrained(folder)` loads a saved folder as is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from diffusers import (
    AutoencoderKLHunyuanVideo15,
    ClassifierFreeGuidance,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
)
from transformers import (
    ByT5Tokenizer,
    Qwen2_5_VLTextConfig,
    Qwen2_5_VLTextModel,
    Qwen2Tokenizer,
    T5Config,
    T5EncoderModel,
)

from sage_grpo.models.hunyuan15.text import SYSTEM_MESSAGE

CHAT_TOKENS = ("<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class TinyConfig:
    """Sizes of the tiny model; `rope` splits `head_dim` into frames, rows and columns."""

    heads: int = 4
    rope: tuple[int, int, int] = (8, 8, 8)
    layers: int = 4
    refiner_layers: int = 2
    text_dim: int = 64
    glyph_dim: int = 16
    vae_channels: tuple[int, ...] = (16, 32, 32)
    vae_layers: int = 1
    latent_channels: int = 16
    shift: float = 5.0
    guidance: float = 6.0

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return sum(self.rope)


def build_tiny(
    seed: int, words: Sequence[str], config: TinyConfig | None = None
) -> HunyuanVideo15Pipeline:
    """The stock pipeline around untrained tiny components; `words` is the caption vocabulary. Weights are fp32."""
    config = config or TinyConfig()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = build_tokenizer(words)
        return HunyuanVideo15Pipeline(
            text_encoder=_text_encoder(config, tokenizer),
            tokenizer=tokenizer,
            transformer=_transformer(config),
            vae=_vae(config),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=config.shift),
            text_encoder_2=_glyph_encoder(config),
            tokenizer_2=ByT5Tokenizer(),
            guider=ClassifierFreeGuidance(guidance_scale=config.guidance),
        )


def build_tokenizer(words: Sequence[str]) -> Qwen2Tokenizer:
    """Byte-level tokenizer in which each of `words`, with or without a leading space, is one token."""
    roles = "system\nuser\nassistant\n"
    corpus = [roles, SYSTEM_MESSAGE, *(f"{word} {word}" for word in words)]
    # Training ends when no pair is left to merge, so the limit only has to be unreachable.
    learned = Qwen2Tokenizer().train_new_from_iterator(
        corpus, vocab_size=65536, new_special_tokens=list(CHAT_TOKENS), show_progress=False
    )
    learned.chat_template = CHAT_TEMPLATE
    return learned


def _text_encoder(config: TinyConfig, tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLTextModel:
    """Three layers: the pipeline reads the third hidden state from the end, here the output of the first layer."""
    heads = 4
    pairs = config.text_dim // heads // 2
    model = Qwen2_5_VLTextModel(
        Qwen2_5_VLTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=config.text_dim,
            intermediate_size=2 * config.text_dim,
            num_hidden_layers=3,
            num_attention_heads=heads,
            num_key_value_heads=2,
            max_position_embeddings=2048,
            initializer_range=config.text_dim**-0.5,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3],
            },
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    # Unit-variance embeddings, so that an untrained encoder keeps the words of a caption well separated.
    torch.nn.init.normal_(model.embed_tokens.weight)
    return model.eval()


def _glyph_encoder(config: TinyConfig) -> T5EncoderModel:
    model = T5EncoderModel(
        T5Config(
            vocab_size=384,  # 3 special tokens, 256 bytes, 125 extra ids, as in ByT5
            d_model=config.glyph_dim,
            d_kv=8,
            d_ff=2 * config.glyph_dim,
            num_layers=2,
            num_heads=2,
            feed_forward_proj="gated-gelu",
            is_encoder_decoder=False,
            tie_word_embeddings=False,
        )
    )
    return model.eval()


def _transformer(config: TinyConfig) -> HunyuanVideo15Transformer3DModel:
    return HunyuanVideo15Transformer3DModel(
        in_channels=2 * config.latent_channels + 1,
        out_channels=config.latent_channels,
        num_attention_heads=config.heads,
        attention_head_dim=config.head_dim,
        num_layers=config.layers,
        num_refiner_layers=config.refiner_layers,
        text_embed_dim=config.text_dim,
        text_embed_2_dim=config.glyph_dim,
        image_embed_dim=16,
        rope_axes_dim=config.rope,
        target_size=32,
        task_type="t2v",
    ).eval()


def _vae(config: TinyConfig) -> AutoencoderKLHunyuanVideo15:
    return AutoencoderKLHunyuanVideo15(
        latent_channels=config.latent_channels,
        block_out_channels=config.vae_channels,
        layers_per_block=config.vae_layers,
        spatial_compression_ratio=2 ** (len(config.vae_channels) - 1),
        temporal_compression_ratio=4,
    ).eval()
