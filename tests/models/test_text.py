"""Prompt embeddings: those of the stock pipeline without their padding, and a cache that cannot be stale."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from sage_grpo.models.text import PromptEncoder, encoder_identity, file_fingerprint

PROMPTS = ["a red circle moving left", 'the letter "B" moving "up"', ""]
CPU = torch.device("cpu")


@pytest.mark.parametrize("prompt", PROMPTS)
def test_embeddings_are_the_valid_tokens_of_the_stock_pipeline(tiny_folder, stock, prompt):
    [cond] = PromptEncoder(tiny_folder, CPU, torch.float64)([prompt])
    with torch.no_grad():
        text, text_mask, glyph, glyph_mask = stock.encode_prompt(prompt, dtype=torch.float64)
    assert 0 < text_mask.sum() < text_mask.numel()
    # Both encoders normalise in fp32 whatever their weights are.
    torch.testing.assert_close(cond.text, text[text_mask.bool()], rtol=0, atol=1e-5)
    torch.testing.assert_close(cond.glyph, glyph[glyph_mask.bool()], rtol=0, atol=1e-5)
    assert (len(cond.glyph) > 0) == ('"' in prompt)


def test_long_prompt_is_cut_where_the_stock_pipeline_cuts_it(tiny_folder):
    [cond] = PromptEncoder(tiny_folder, CPU, torch.float32)(["red " * 1500 + '"' + "x" * 400 + '"'])
    assert (len(cond.text), len(cond.glyph)) == (1000, 256)


def test_cache_hit_is_bit_equal_and_loads_no_encoder(tiny_folder, tmp_path):
    first = PromptEncoder(tiny_folder, CPU, torch.float32, tmp_path)(PROMPTS)
    again = PromptEncoder(tiny_folder, CPU, torch.float32, tmp_path)
    for old, new in zip(first, again(PROMPTS), strict=True):
        assert torch.equal(old.text, new.text)
        assert torch.equal(old.glyph, new.glyph)
        assert old.glyph.shape == new.glyph.shape
    assert again._models is None
    assert len(list(tmp_path.glob("*/*.safetensors"))) == len(PROMPTS)
    assert not list(tmp_path.glob("*/*.tmp"))


def test_released_encoders_come_back(tiny_folder):
    encoder = PromptEncoder(tiny_folder, CPU, torch.float32)
    [before] = encoder(["a red circle"])
    encoder.release()
    assert encoder._models is None
    assert torch.equal(encoder(["a red circle"])[0].text, before.text)


def test_changed_weights_miss_the_cache(tiny_folder, tmp_path):
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    [before] = PromptEncoder(folder, CPU, torch.float32, tmp_path / "cache")(["a red circle"])
    weights = load_file(folder / "text_encoder" / "model.safetensors")
    weights["embed_tokens.weight"] *= 1.01
    save_file(weights, folder / "text_encoder" / "model.safetensors", metadata={"format": "pt"})
    [after] = PromptEncoder(folder, CPU, torch.float32, tmp_path / "cache")(["a red circle"])
    assert (after.text - before.text).abs().max() > 1e-3


def test_identity_depends_on_tokenizer_and_precision(tiny_folder, tmp_path):
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    original = encoder_identity(folder, torch.float32)
    assert original == encoder_identity(tiny_folder, torch.float32)
    assert original != encoder_identity(folder, torch.bfloat16)
    template = folder / "tokenizer" / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    assert original != encoder_identity(folder, torch.float32)


def test_fingerprint_of_a_large_file_samples_it_evenly(tmp_path):
    path = tmp_path / "weights"
    content = bytearray(range(256)) * 4

    def fingerprint(position=None, extra=b""):
        changed = bytearray(content)
        if position is not None:
            changed[position] ^= 1
        path.write_bytes(changed + extra)
        return file_fingerprint(path, blocks=4, block_size=16)

    original = fingerprint()
    assert original == fingerprint()
    assert all(fingerprint(position) != original for position in (0, 256, 512 + 15, 768))
    assert fingerprint(extra=b"x") != original
