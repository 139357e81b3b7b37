"""Copies of clips that do not tell where they come from."""

import subprocess

import pytest
from imageio_ffmpeg import get_ffmpeg_exe

from sage_grpo.runs.media import read_mp4, write_mp4
from sage_grpo.tools.prefer.blinding import MIN_BOX, blind_copies, equal_size, padded, strip
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


def test_tags_and_chapters_of_a_clip_from_others_do_not_stay(sources, tmp_path):
    tags = tmp_path / "tags.txt"
    tags.write_text(
        ";FFMETADATA1\ntitle=secret\n[CHAPTER]\nTIMEBASE=1/1000\nSTART=0\nEND=500\ntitle=secret\n"
    )
    words = ["-i", tags, "-map_metadata", "1", "-map_chapters", "1", "-c", "copy"]
    words += ["-metadata:s:v", "handler_name=secret", "-timecode", "01:02:03:04"]
    convert(sources[0], *words, tmp_path / "tagged.mp4")
    strip(tmp_path / "tagged.mp4", tmp_path / "copy.mp4")
    copy = (tmp_path / "copy.mp4").read_bytes()
    for trace in (b"secret", b"chpl", b"tmcd"):
        assert trace in (tmp_path / "tagged.mp4").read_bytes()
    for trace in (b"secret", b"chpl", b"chap", b"tmcd", b"text"):
        assert trace not in copy
    assert copy.count(b"trak") == 1


@pytest.mark.parametrize("codec", ["libx265", "mpeg4"])
def test_other_codecs_which_keep_the_settings_of_their_encoders_are_refused(
    sources, tmp_path, codec
):
    convert(sources[0], "-c:v", codec, tmp_path / "a.mp4")
    with pytest.raises(ValueError, match=r"a\.mp4 cannot be used as an H\.264 clip.*libx264"):
        strip(tmp_path / "a.mp4", tmp_path / "copy.mp4")
    assert not (tmp_path / "copy.mp4").exists()


def convert(source, *words):
    command = [get_ffmpeg_exe(), "-v", "error", "-i", source, *words]
    subprocess.run(list(map(str, command)), check=True, capture_output=True)


def test_a_copy_replaces_a_link_of_its_name(sources, tmp_path):
    (tmp_path / "private").write_text("mine")
    (tmp_path / "copy.mp4").symlink_to("private")
    strip(sources[0], tmp_path / "copy.mp4")
    assert (tmp_path / "private").read_text() == "mine"
    assert not (tmp_path / "copy.mp4").is_symlink()


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
