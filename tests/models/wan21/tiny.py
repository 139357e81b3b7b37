"""A tiny, untrained Wan 2.1: every class is the real one, every size is small, nothing is downloaded."""

import torch
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from transformers import T5TokenizerFast, UMT5Config, UMT5EncoderModel

from sage_grpo.models.backbone import Sampling

CHANNELS = 4
SAMPLING = Sampling(frames=9, height=32, width=32, fps=8, shift=3.0, guidance=5.0, num_steps=20)


def tokenizer_of(words):
    """Words, and single letters for all others."""
    pieces = ["<pad>", "</s>", "<unk>", "▁", *(f"▁{word}" for word in words)]
    letters = [chr(code) for code in range(33, 127) if chr(code) not in pieces]
    scores = [0.0, 0.0, 0.0, -3.0, *[-1.0] * len(words), *[-5.0] * len(letters)]
    return T5TokenizerFast(vocab=list(zip([*pieces, *letters], scores, strict=True)), extra_ids=0)


def build_wan(words, seed=0, layers=2, heads=4):
    """The stock pipeline around untrained tiny components, in fp32; statistics of the latents are far from 0 and 1."""
    tokenizer = tokenizer_of(words)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        text = UMT5Config(
            vocab_size=len(tokenizer), d_model=24, d_kv=8, d_ff=32, num_layers=2, num_heads=3,
            feed_forward_proj="gated-gelu", is_encoder_decoder=False, tie_word_embeddings=False,
        )  # fmt: skip
        transformer = WanTransformer3DModel(
            num_attention_heads=heads, attention_head_dim=12, in_channels=CHANNELS, out_channels=CHANNELS, text_dim=24,
            freq_dim=32, ffn_dim=80, num_layers=layers, rope_max_seq_len=64,
        )  # fmt: skip
        vae = AutoencoderKLWan(
            base_dim=4, z_dim=CHANNELS, num_res_blocks=1, latents_mean=[0.5, -1.0, 0.1, 2.0],
            latents_std=[0.4, 2.0, 1.5, 0.7],
        )  # fmt: skip
        pipe = WanPipeline(tokenizer, UMT5EncoderModel(text).eval(), vae.eval(),
                           FlowMatchEulerDiscreteScheduler(shift=SAMPLING.shift), transformer.eval())  # fmt: skip
        with torch.no_grad():
            torch.nn.init.normal_(pipe.text_encoder.shared.weight)
            for parameter in transformer.parameters():  # no norm weight stays at 1, where a swap would not show
                parameter.add_(0.05 * torch.randn(parameter.shape))
    return pipe
