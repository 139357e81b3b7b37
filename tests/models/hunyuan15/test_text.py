"""Text embeddings equal the stock pipeline's without padding, and different encoders are distinguished."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from sage_grpo.data.requests import Request
from sage_grpo.models.embeddings import Embeddings
from sage_grpo.models.hunyuan15.folder import ModelFolder
from sage_grpo.models.hunyuan15.text import TextEncoder

PROMPTS = ["a red circle moving left", 'the letter "B" moving "up"', ""]
CPU = torch.device("cpu")


def text_encoder(folder, dtype=torch.float32):
    return TextEncoder(ModelFolder(folder), CPU, dtype)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_embeddings_are_the_valid_tokens_of_the_stock_pipeline(tiny_folder, stock, prompt):
    cond = text_encoder(tiny_folder, torch.float64).encode(Request(prompt))
    with torch.no_grad():
        text, text_mask, glyph, glyph_mask = stock.encode_prompt(prompt, dtype=torch.float64)
    assert 0 < text_mask.sum() < text_mask.numel()
    # Both encoders normalize in fp32 whatever their weights are.
    torch.testing.assert_close(cond.text, text[text_mask.bool()], rtol=0, atol=1e-5)
    torch.testing.assert_close(cond.glyph, glyph[glyph_mask.bool()], rtol=0, atol=1e-5)
    assert (len(cond.glyph) > 0) == ('"' in prompt)


def test_long_prompt_is_cut_where_the_stock_pipeline_cuts_it(tiny_folder):
    cond = text_encoder(tiny_folder).encode(Request("red " * 1500 + '"' + "x" * 400 + '"'))
    assert (len(cond.text), len(cond.glyph)) == (1000, 256)


def test_released_encoders_come_back_for_a_new_prompt_alone(tiny_folder):
    embeddings = Embeddings(text_encoder(tiny_folder), CPU)
    [before] = embeddings([Request("a red circle")])
    embeddings.encoder.release()
    assert torch.equal(embeddings([Request("a red circle")])[0].text, before.text)
    assert embeddings.encoder._models is None
    [new] = embeddings([Request("a red square")])
    assert embeddings.encoder._models is not None and new.text.shape == before.text.shape


def test_changed_weights_miss_the_cache(tiny_folder, tmp_path):
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    request = Request("a red circle")
    [before] = Embeddings(text_encoder(folder), CPU, tmp_path / "cache")([request])
    weights = load_file(folder / "text_encoder" / "model.safetensors")
    weights["embed_tokens.weight"] *= 1.01
    save_file(weights, folder / "text_encoder" / "model.safetensors", metadata={"format": "pt"})
    [after] = Embeddings(text_encoder(folder), CPU, tmp_path / "cache")([request])
    assert (after.text - before.text).abs().max() > 1e-3


def test_identity_depends_on_tokenizer_and_precision(tiny_folder, tmp_path):
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    original = text_encoder(folder).identity()
    assert original == text_encoder(tiny_folder).identity()
    assert original != text_encoder(folder, torch.bfloat16).identity()
    template = folder / "tokenizer" / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    assert original != text_encoder(folder).identity()
