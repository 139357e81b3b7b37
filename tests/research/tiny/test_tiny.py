"""The tiny model is built from a seed alone, and the stock pipeline loads its folder as is."""

import pytest
import torch
from diffusers import HunyuanVideo15Pipeline
from transformers import Qwen2Tokenizer

from research.tiny.tiny import TinyConfig, build_tiny, build_tokenizer
from sage_grpo.models.hunyuan15.text import SYSTEM_MESSAGE, TEMPLATE_TOKENS

WORDS = (
    "a",
    "and",
    "red",
    "green",
    "grey",
    "circle",
    "square",
    "moving",
    "quickly",
    "left",
    "letter",
)


def weights(pipe):
    parts = (pipe.transformer, pipe.vae, pipe.text_encoder, pipe.text_encoder_2)
    return [value for part in parts for value in part.state_dict().values()]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    build_tiny(0, WORDS).to(torch.float16).save_pretrained(folder)
    return folder


def test_each_word_is_one_token_wherever_it_stands(saved):
    for tokenizer in (build_tokenizer(WORDS), Qwen2Tokenizer.from_pretrained(saved / "tokenizer")):
        for word in WORDS:
            assert len(tokenizer.encode(word)) == len(tokenizer.encode(f" {word}")) == 1, word
        assert len(tokenizer.encode("unheard")) > 1
        assert tokenizer.decode(tokenizer.encode("a grey Zürich")) == "a grey Zürich"


def test_chat_prefix_has_the_length_that_the_stock_pipeline_crops():
    tokenizer = build_tokenizer(WORDS)
    chat = [
        {"role": "system", "content": SYSTEM_MESSAGE},
        {"role": "user", "content": "red circle"},
    ]
    tokens = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True)["input_ids"]
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokens[TEMPLATE_TOKENS : TEMPLATE_TOKENS + 3] == [*tokenizer.encode("red circle"), end]


def test_weights_depend_on_the_seed_alone():
    torch.manual_seed(5)
    first = weights(build_tiny(3, WORDS))
    after = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(1), after)  # the caller's random state is untouched
    assert all(torch.equal(a, b) for a, b in zip(first, weights(build_tiny(3, WORDS)), strict=True))
    assert not torch.equal(first[0], weights(build_tiny(4, WORDS))[0])


def test_stock_pipeline_generates_from_the_saved_folder(saved):
    assert sum(path.stat().st_size for path in saved.rglob("*") if path.is_file()) < 15e6
    pipe = HunyuanVideo15Pipeline.from_pretrained(saved, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    [clip] = pipe("a red circle", height=16, width=16, num_frames=5, num_inference_steps=1).frames
    assert clip.shape == (5, 16, 16, 3)


def test_sizes_follow_the_config():
    pipe = build_tiny(
        0,
        WORDS,
        TinyConfig(heads=2, rope=(4, 10, 10), layers=1, text_dim=32, vae_channels=(8, 16, 16)),
    )
    assert pipe.transformer.x_embedder.proj.out_channels == 48
    assert pipe.text_encoder.config.hidden_size == pipe.transformer.config.text_embed_dim == 32
    assert len(pipe.transformer.transformer_blocks) == 1
