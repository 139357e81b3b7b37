"""Each request is encoded once: in memory, on disk, and by ranks that share a folder."""

import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from sage_grpo.data.requests import Request
from sage_grpo.models.embeddings import Embeddings
from sage_grpo.models.hunyuan15.folder import ModelFolder
from sage_grpo.models.hunyuan15.text import TextConditioning, TextEncoder

REQUESTS = [Request("a red circle moving left"), Request('the letter "B" moving "up"'), Request("")]
SIX = [Request(f"a red circle {number}") for number in range(6)]
CPU = torch.device("cpu")


def open_embeddings(folder, cache_dir=None):
    return Embeddings(TextEncoder(ModelFolder(folder), CPU, torch.float32), CPU, cache_dir)


def test_conditioning_moves_all_its_tensors():
    cond = TextConditioning(torch.ones(3, 4), torch.zeros(0, 2)).to(dtype=torch.float64)
    assert (cond.text.dtype, cond.glyph.dtype) == (torch.float64, torch.float64)
    assert cond.to("meta").glyph.device.type == "meta"
    assert cond.to("meta").text.shape == (3, 4)


def test_cache_hit_is_bit_equal_and_loads_no_encoder(tiny_folder, tmp_path):
    first = open_embeddings(tiny_folder, tmp_path)(REQUESTS)
    again = open_embeddings(tiny_folder, tmp_path)
    for old, new in zip(first, again(REQUESTS), strict=True):
        assert torch.equal(old.text, new.text)
        assert torch.equal(old.glyph, new.glyph)
        assert old.glyph.shape == new.glyph.shape
    assert again.encoder._models is None
    assert len(list(tmp_path.glob("*/*.safetensors"))) == len(REQUESTS)
    assert not list(tmp_path.glob("*/*.tmp"))


@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disk"])
def test_prepared_requests_need_no_encoder_and_are_bit_equal(tiny_folder, tmp_path, on_disk):
    embeddings = open_embeddings(tiny_folder, tmp_path if on_disk else None)
    embeddings.prepare([*reversed(REQUESTS), REQUESTS[0]])
    conditions = embeddings(REQUESTS)
    assert embeddings.encoder._models is None
    for request, cond in zip(REQUESTS, conditions, strict=True):
        [plain] = open_embeddings(tiny_folder)([request])
        assert torch.equal(cond.text, plain.text) and torch.equal(cond.glyph, plain.glyph)
        assert cond.glyph.shape == plain.glyph.shape


@pytest.fixture
def encoded(monkeypatch):
    """The requests that any encoder encodes, in order; `encoded.then` runs after each."""
    plain = TextEncoder.encode
    seen = SimpleNamespace(requests=[], then=lambda: None)

    def watched(self, request):
        seen.requests.append(request)
        cond = plain(self, request)
        seen.then()
        return cond

    monkeypatch.setattr(TextEncoder, "encode", watched)
    return seen


@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disk"])
def test_requests_of_one_text_are_encoded_once(tiny_folder, tmp_path, encoded, on_disk):
    embeddings = open_embeddings(tiny_folder, tmp_path if on_disk else None)
    embeddings.prepare([Request("a red circle", 3, seed=7), Request("a red circle", 4)])
    embeddings([Request("a red circle", 5, seed=8)])
    assert encoded.requests == [Request("a red circle")]


@pytest.mark.parametrize(
    "rank, order", [(0, [0, 1, 5, 4, 3, 2]), (1, [2, 3, 1, 0, 5, 4]), (2, [4, 5, 3, 2, 1, 0])]
)
def test_a_rank_takes_its_part_and_then_what_others_leave(
    tiny_folder, tmp_path, encoded, rank, order, capsys
):
    """The first rank shows how far its part is: at equal speed that is how far all are."""
    open_embeddings(tiny_folder, tmp_path).prepare(SIX, rank, 3)
    assert encoded.requests == [SIX[number] for number in order]
    shown = capsys.readouterr().err
    assert ("prompt embeddings: 100%" in shown and "2/2" in shown) == (rank == 0)


def test_ranks_that_share_a_folder_encode_each_request_once(tiny_folder, tmp_path, encoded):
    ranks = [open_embeddings(tiny_folder, tmp_path) for _ in range(2)]

    def let_the_other_work():
        encoded.then = lambda: None
        ranks[1](SIX[3:])

    encoded.then = let_the_other_work
    ranks[0].prepare(SIX, 0, 2)
    assert sorted(encoded.requests, key=lambda request: request.text) == SIX
    ranks[1].prepare(SIX, 1, 2)
    assert len(encoded.requests) == len(SIX)


def test_without_a_folder_every_rank_encodes_all(tiny_folder, encoded):
    open_embeddings(tiny_folder).prepare(SIX, 1, 3)
    assert encoded.requests == SIX


def test_a_damaged_file_is_named_before_it_is_needed(tiny_folder, tmp_path):
    embeddings = open_embeddings(tiny_folder, tmp_path)
    embeddings(REQUESTS)
    path = embeddings.path(REQUESTS[1])
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=rf"prompt_cache: {path} is damaged .*; delete it"):
        embeddings.prepare(REQUESTS)


def test_a_file_of_another_prompt_or_encoder_is_made_again_and_said(
    tiny_folder, tmp_path, encoded, capsys
):
    first = open_embeddings(tiny_folder, tmp_path)
    expected = [cond.text.clone() for cond in first(REQUESTS)]
    copied = first.path(REQUESTS[0])
    unlabeled = first.path(REQUESTS[2])
    shutil.copy(first.path(REQUESTS[1]), copied)  # another prompt
    # nothing says which encoder made it
    save_file(load_file(unlabeled), unlabeled, metadata={"prompt": REQUESTS[2].text})
    encoded.requests.clear()
    assert "was not made for its prompt" not in capsys.readouterr().err

    conditions = open_embeddings(tiny_folder, tmp_path)(REQUESTS)
    assert encoded.requests == [REQUESTS[0], REQUESTS[2]]
    note = f"{copied} was not made for its prompt by this encoder"
    assert capsys.readouterr().err.count(note) == 1
    assert all(torch.equal(old, new.text) for old, new in zip(expected, conditions, strict=True))

    other = open_embeddings(tiny_folder, tmp_path)
    other.folder = tmp_path / "another_encoder"
    shutil.copytree(first.folder, other.folder)
    assert REQUESTS[0] in first and REQUESTS[0] not in other


def test_a_file_with_other_tensors_is_made_again(tiny_folder, tmp_path):
    embeddings = open_embeddings(tiny_folder, tmp_path)
    [cond] = embeddings(REQUESTS[:1])
    label = {"made_for": embeddings.label(REQUESTS[0])}
    save_file({"image": cond.text}, embeddings.path(REQUESTS[0]), metadata=label)
    assert torch.equal(embeddings(REQUESTS[:1])[0].text, cond.text)


def test_a_cache_that_cannot_be_written_is_named(tiny_folder, tmp_path):
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(
        ValueError, match=r"prompt_cache: .*taken.* cannot be created .*; name another folder"
    ):
        open_embeddings(tiny_folder, tmp_path / "taken").prepare(REQUESTS)
