"""Images of requests: every kind of file becomes an upright RGB picture, or one sentence."""

import os
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sage_grpo.data.images import MAX_PIXELS, open_picture, read_image
from sage_grpo.data.requests import Request, read_requests

LEFT_RED = np.zeros((4, 6, 3), dtype=np.uint8)
LEFT_RED[:, :3, 0] = 255  # red on the left
LEFT_RED[:, 3:, 2] = 255  # blue on the right


def save(path, picture, **options):
    picture.save(path, **options)
    return path


def pixels(path):
    picture = open_picture(path)
    assert picture.mode == "RGB"
    return np.array(picture)


@pytest.mark.parametrize("name", ["p.png", "p.bmp", "p.tiff", "p.gif", "p.webp"])
def test_formats_give_the_same_pixels(tmp_path, name):
    options = {"lossless": True} if name == "p.webp" else {}
    path = save(tmp_path / name, Image.fromarray(LEFT_RED), **options)
    assert np.array_equal(pixels(path), LEFT_RED)


def test_the_ending_of_the_name_does_not_matter(tmp_path):
    save(tmp_path / "p.png", Image.fromarray(LEFT_RED)).rename(tmp_path / "p.jpg")
    assert np.array_equal(pixels(tmp_path / "p.jpg"), LEFT_RED)


@pytest.mark.parametrize("mode", ["P", "RGBA", "CMYK", "L", "1", "LA"])
def test_modes_become_rgb(tmp_path, mode):
    picture = Image.fromarray(LEFT_RED).convert(mode)
    path = save(tmp_path / ("p.tiff" if mode == "CMYK" else "p.png"), picture)
    expected = np.array(picture.convert("RGB"))
    assert np.array_equal(pixels(path), expected)
    assert len(np.unique(expected)) > 1


def test_an_image_is_turned_as_its_exif_data_say(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held sideways: turn by 90 degrees, clockwise
    path = save(tmp_path / "p.png", Image.fromarray(LEFT_RED), exif=exif)
    assert np.array_equal(pixels(path), np.rot90(LEFT_RED, -1))
    assert read_image(path, "here").shape == (6, 4)


def test_an_animation_gives_its_first_frame(tmp_path):
    frames = [Image.fromarray(LEFT_RED), Image.fromarray(255 - LEFT_RED)]
    path = save(tmp_path / "p.gif", frames[0], save_all=True, append_images=frames[1:])
    assert np.array_equal(pixels(path), LEFT_RED)


def test_a_single_pixel_fills_a_clip(tmp_path):
    path = save(tmp_path / "p.png", Image.new("RGB", (1, 1), (9, 8, 7)))
    request = Request("a", image=read_image(path, "here")).sized(16, 24)
    expected = np.broadcast_to([9, 8, 7], (16, 24, 3))
    assert np.array_equal(np.array(request.image.cropped()), expected)


def test_the_crop_is_around_the_center(tmp_path):
    stripes = np.repeat(np.arange(40, dtype=np.uint8), 10)
    wide = stripes[None, :, None].repeat(100, 0).repeat(3, 2)  # 100 x 400
    path = save(tmp_path / "p.png", Image.fromarray(wide))
    request = Request("a", image=read_image(path, "here")).sized(100, 100)
    assert np.array_equal(np.array(request.image.cropped()), wide[:, 150:250])


def huge(path):
    """A few bytes that claim to be a picture of 10^10 pixels."""
    save(path, Image.new("L", (1, 1)))
    data = bytearray(path.read_bytes())
    data[16:24] = (100_000).to_bytes(4, "big") * 2
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    path.write_bytes(data)


def cut(path):
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    save(path, Image.fromarray(noise))
    path.write_bytes(path.read_bytes()[:3000])


BAD = {
    "missing": (lambda path: None, "does not exist; it must be one of PNG, JPEG"),
    "a folder": (lambda path: path.mkdir(), "cannot be read"),
    "empty": (lambda path: path.touch(), "cannot be read"),
    "text": (lambda path: path.write_text("hello"), "cannot be read"),
    "cut off": (cut, "cannot be read"),
    "postscript": (lambda path: path.write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"), "cannot be read"),
    "huge": (huge, "cannot be read|it may have at most 67,108,864 pixels"),
    "large": (lambda path: save(path, Image.new("1", (1 << 14, (1 << 12) + 1))), "at most 67,108,864 pixels"),
    "thin": (lambda path: save(path, Image.new("RGB", (1, 17))), "is 1 x 17 in mode RGB; .* 16 times the other"),
    "16 bits": (lambda path: save(path, Image.new("I;16", (4, 4), 40000)), "in mode I;16; .* 8 bits per channel"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_image_is_one_sentence_that_names_its_line(tmp_path, name):
    make, message = BAD[name]
    make(tmp_path / "bad.png")
    (tmp_path / "p.csv").write_text("prompt,image\na boat,bad.png\n")
    with pytest.raises(
        ValueError, match=rf"^\S+p\.csv line 2: the image \S+bad\.png .*({message})"
    ) as error:
        read_requests(tmp_path / "p.csv")
    assert "\n" not in str(error.value)


def test_the_limits_themselves_are_allowed(tmp_path):
    path = save(tmp_path / "p.png", Image.new("L", (1, 16)))
    assert read_image(path, "here").shape == (16, 1)
    path = save(tmp_path / "q.png", Image.new("1", (1 << 13, 1 << 13)))
    assert MAX_PIXELS == (1 << 26) and read_image(path, "here").shape == (1 << 13, 1 << 13)


def test_images_are_found_relative_to_the_prompt_file(tmp_path):
    (tmp_path / "deep").mkdir()
    path = save(tmp_path / "deep" / "p.png", Image.fromarray(LEFT_RED))
    (tmp_path / "p.csv").write_text(f"prompt,seed,image\na,3,deep/p.png\nb,4,{path}\nc,,\n")
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "image": "deep/p.png"}\n')
    relative, absolute, without = read_requests(tmp_path / "p.csv")
    assert relative.image == absolute.image and relative.image.path == path
    assert without.image is None
    assert read_requests(tmp_path / "p.jsonl") == [Request("a", 0, None, relative.image)]
    assert relative.content == Request("a", image=relative.image)
    assert relative.sized(8, 8).key != relative.key


def test_a_name_of_several_lines_is_one_sentence(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "image": "a\\n\\u001b[2J.png"}\n')
    with pytest.raises(ValueError, match="does not exist") as error:
        read_requests(tmp_path / "p.jsonl")
    assert str(error.value).isprintable()


@pytest.mark.parametrize("value", ["7", "[1]", "true", '{"a": 1}'])
def test_an_image_must_be_a_path(tmp_path, value):
    (tmp_path / "p.jsonl").write_text(f'{{"prompt": "a", "image": {value}}}\n')
    with pytest.raises(ValueError, match=r"line 1: image is a \w+; it must be the path of a file"):
        read_requests(tmp_path / "p.jsonl")


def test_names_of_requests_without_an_image_stay():
    """Those of caches and clips that earlier versions wrote."""
    assert Request("a red circle").key == "a1e4a280d27cad5b1aa05b230031f649"


def test_a_prompt_file_names_no_image_outside_its_folder(tmp_path):
    secret = save(tmp_path / "secret.png", Image.fromarray(LEFT_RED))
    folder = tmp_path / "prompts"
    folder.mkdir()
    (folder / "link.png").symlink_to(secret)
    for name in (secret, "../secret.png", "link.png", "/dev/zero"):
        (folder / "p.csv").write_text(f"prompt,image\na boat,{name}\n")
        with pytest.raises(ValueError, match=r"p\.csv line 2: .* must be in the folder of its"):
            read_requests(folder / "p.csv")
    assert read_image(folder / "link.png", "--image").shape == (4, 6)  # from a command line


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "p.csv").write_text("prompt,image\na boat,pipe.png\n")
    with pytest.raises(ValueError, match="is not a regular file"):
        read_requests(tmp_path / "p.csv")


def test_a_device_is_not_read_even_from_a_command_line():
    with pytest.raises(ValueError, match="is not a regular file"):
        read_image(Path("/dev/zero"), "--image")
