"""Paths from others: nothing but regular files is opened, no link is followed, drafts take no name of the user."""

import os
from pathlib import Path

import pytest

from sage_grpo.files.foreign import (
    Refused,
    check_regular,
    copy_regular,
    inside,
    new_folder,
    new_name,
    open_regular,
    read_bytes,
    replace_text,
)


def test_a_regular_file_is_read_up_to_a_size(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    assert read_bytes(tmp_path / "a", 3) == b"abc"
    with pytest.raises(Refused, match="has 3 bytes; at most 2"):
        read_bytes(tmp_path / "a", 2)
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "missing", 2)


def link(path):
    path.with_name("target").write_text("secret")
    path.symlink_to(path.with_name("target"))


@pytest.mark.parametrize("make", [link, os.mkfifo, Path.mkdir], ids=["link", "pipe", "folder"])
def test_nothing_else_is_opened(tmp_path, make):
    make(tmp_path / "a")
    with pytest.raises(Refused), open_regular(tmp_path / "a"):
        pass
    with pytest.raises(Refused):
        copy_regular(tmp_path / "a", tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_a_device_without_an_end_is_refused():
    with pytest.raises(Refused, match="not a regular file"):
        read_bytes(Path("/dev/zero"), 10)


def test_what_leads_out_of_a_folder_is_refused(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    (root / "out").symlink_to(tmp_path)
    (root / "in").symlink_to(root)
    for name in ("../a", "/etc/passwd", "out/a"):
        with pytest.raises(Refused, match="it is not in"):
            inside(root, root / name)
    assert inside(root, root / "in" / "a") == inside(root, root / "a") == root.resolve() / "a"


def test_what_is_no_regular_file_is_found_at_any_depth(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    check_regular(tmp_path, ["a", "missing"])
    (tmp_path / "a" / "b" / "c").symlink_to("nowhere")
    with pytest.raises(Refused, match="a/b/c is a link"):
        check_regular(tmp_path, ["a"])
    check_regular(tmp_path, ["a"], unless_below=("a",))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(Refused, match="pipe is a pipe"):
        check_regular(tmp_path, ["pipe"])


@pytest.mark.parametrize("make", [link, os.mkfifo], ids=["link", "pipe"])
def test_a_text_replaces_whatever_has_its_name(tmp_path, make):
    make(tmp_path / "a")
    replace_text(tmp_path / "a", "text \ud800")
    assert (tmp_path / "a").read_text() == "text ?"
    assert not (tmp_path / "a").is_symlink()
    target = tmp_path / "target"
    assert not target.exists() or target.read_text() == "secret"


def test_names_of_drafts_are_new(tmp_path):
    assert new_name(tmp_path / "a") != new_name(tmp_path / "a")
    assert new_folder(tmp_path / "a") != new_folder(tmp_path / "a")
    assert len(list(tmp_path.iterdir())) == 2


def test_no_code_names_drafts_of_its_own():
    """A fixed name may be taken. Drafts of checkpoints have one, in the run's own folder, and exports, in a new one."""
    root = Path(__file__).parents[2]
    sources = [
        file
        for part in ("sage_grpo", "scripts", "research")
        for file in (root / part).rglob("*.py")
    ]
    named = {file.relative_to(root).as_posix() for file in sources if ".tmp" in file.read_text()}
    assert named == {
        "sage_grpo/files/foreign.py",
        "sage_grpo/train/checkpoint_folders.py",
        "sage_grpo/train/saving.py",
        "scripts/export_checkpoint.py",
    }
