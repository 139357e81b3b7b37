"""Prompt embeddings: those of the stock pipeline without their padding, and a cache that cannot be stale."""

import shutil
from types import SimpleNamespace

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


def test_released_encoders_come_back_for_a_new_prompt_alone(tiny_folder):
    encoder = PromptEncoder(tiny_folder, CPU, torch.float32)
    [before] = encoder(["a red circle"])
    encoder.release()
    assert torch.equal(encoder(["a red circle"])[0].text, before.text)
    assert encoder._models is None
    [new] = encoder(["a red square"])
    assert encoder._models is not None and new.text.shape == before.text.shape


@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disk"])
def test_prepared_prompts_need_no_encoder_and_are_bit_equal(tiny_folder, tmp_path, on_disk):
    encoder = PromptEncoder(tiny_folder, CPU, torch.float32, tmp_path if on_disk else None)
    encoder.prepare([*reversed(PROMPTS), PROMPTS[0]])
    encoder.release()
    found = encoder(PROMPTS)
    assert encoder._models is None
    for prompt, cond in zip(PROMPTS, found, strict=True):
        [plain] = PromptEncoder(tiny_folder, CPU, torch.float32)([prompt])
        assert torch.equal(cond.text, plain.text) and torch.equal(cond.glyph, plain.glyph)
        assert cond.glyph.shape == plain.glyph.shape


@pytest.fixture
def encoded(monkeypatch):
    """The prompts that any encoder encodes, in order; `encoded.then` runs after each."""
    plain, seen = PromptEncoder._encode, SimpleNamespace(prompts=[], then=lambda: None)

    def watched(self, prompt):
        seen.prompts.append(prompt)
        found = plain(self, prompt)
        seen.then()
        return found

    monkeypatch.setattr(PromptEncoder, "_encode", watched)
    return seen


SIX = [f"a red circle {number}" for number in range(6)]


@pytest.mark.parametrize("rank, order", [(0, [0, 1, 5, 4, 3, 2]), (1, [2, 3, 1, 0, 5, 4]), (2, [4, 5, 3, 2, 1, 0])])
def test_a_rank_takes_its_part_and_then_what_others_leave(tiny_folder, tmp_path, encoded, rank, order, capsys):
    """The first rank shows how far its part is: at equal speed that is how far all are."""
    PromptEncoder(tiny_folder, CPU, torch.float32, tmp_path).prepare(SIX, rank, 3)
    assert encoded.prompts == [SIX[number] for number in order]
    shown = capsys.readouterr().err
    assert ("prompt embeddings: 100%" in shown and "2/2" in shown) == (rank == 0)


def test_ranks_that_share_a_folder_encode_each_prompt_once(tiny_folder, tmp_path, encoded):
    ranks = [PromptEncoder(tiny_folder, CPU, torch.float32, tmp_path) for _ in range(2)]

    def let_the_other_work():
        encoded.then = lambda: None
        ranks[1](SIX[3:])

    encoded.then = let_the_other_work
    ranks[0].prepare(SIX, 0, 2)
    assert sorted(encoded.prompts) == SIX
    ranks[1].prepare(SIX, 1, 2)
    assert len(encoded.prompts) == len(SIX)


def test_without_a_folder_every_rank_encodes_all(tiny_folder, encoded):
    PromptEncoder(tiny_folder, CPU, torch.float32).prepare(SIX, 1, 3)
    assert encoded.prompts == SIX


def test_a_damaged_file_is_named_before_it_is_needed(tiny_folder, tmp_path):
    encoder = PromptEncoder(tiny_folder, CPU, torch.float32, tmp_path)
    encoder(PROMPTS)
    path = encoder.cache.path(PROMPTS[1])
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=rf"prompt_cache: {path} is damaged .*; delete it"):
        encoder.prepare(PROMPTS)


def test_a_cache_that_cannot_be_written_is_named(tiny_folder, tmp_path):
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(ValueError, match=r"prompt_cache: .*taken.* cannot be made .*; name another folder"):
        PromptEncoder(tiny_folder, CPU, torch.float32, tmp_path / "taken").prepare(PROMPTS)


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
