"""Copies of clips that do not tell where they come from."""

import pytest

from sage_grpo.runs.media import read_mp4, write_mp4
from sage_grpo.tools.prefer.blinding import MIN_BOX, blind_copies, equal_size, padded
from tests.tools.prefer.studies import draw_clip

# imageio's reader leaves the pipes of its ffmpeg process to the garbage collector
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    paths = [folder / f"secret-{number}.mp4" for number in range(6)]
    for number, path in enumerate(paths):
        write_mp4(path, draw_clip(number % 2, number), 8)
    return paths


def test_copies_have_random_numbers_no_metadata_and_the_same_pixels(sources, tmp_path):
    assert b"x264" in sources[0].read_bytes()
    names = blind_copies(sources, tmp_path / "clips", seed=3)
    assert sorted(names) == [f"{number}.mp4" for number in range(6)] != names
    assert names != blind_copies(sources, tmp_path / "again", seed=4)
    for source, name in zip(sources, names, strict=True):
        copy = tmp_path / "clips" / name
        for trace in (b"x264", b"Lavf", b"Lavc", b"secret"):
            assert trace not in copy.read_bytes()
        assert read_mp4(copy)[0].equal(read_mp4(source)[0])


def test_padding_changes_the_size_alone(sources, tmp_path):
    names = blind_copies(sources[:2], tmp_path, seed=0)
    files = [(tmp_path / name).read_bytes() for name in names]
    size = equal_size(*map(len, files))
    first, second = (padded(file, size) for file in files)
    assert len(first) == len(second) == size
    assert padded(files[0], len(files[0])) == files[0]
    (tmp_path / "padded.mp4").write_bytes(first)
    assert read_mp4(tmp_path / "padded.mp4")[0].equal(read_mp4(tmp_path / names[0])[0])
    with pytest.raises(ValueError, match="too few"):
        padded(files[0], len(files[0]) + MIN_BOX - 1)


@pytest.mark.parametrize("content", [b"", b"<html>", b"#EXTM3U\nfile:///etc/passwd\n"])
def test_what_is_no_mp4_is_named(tmp_path, content):
    (tmp_path / "a.mp4").write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.mp4 cannot be used"):
        blind_copies([tmp_path / "a.mp4"], tmp_path / "clips", seed=0)
    assert list((tmp_path / "clips").iterdir()) == []
