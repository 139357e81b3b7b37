"""A committed folder is either unchanged or rejected with the name of a file."""

import json
import os

import pytest

from sage_grpo.files import manifest
from tests.hostile import hashes_of


@pytest.fixture
def folder(tmp_path):
    draft = tmp_path / "draft"
    (draft / "part").mkdir(parents=True)
    (draft / "a.txt").write_text("alpha")
    (draft / "part" / "b.txt").write_text("beta")
    files = [draft / "a.txt", draft / "part" / "b.txt"]
    manifest.commit(draft, tmp_path / "whole", hashes_of(draft, files))
    return tmp_path / "whole"


def test_a_committed_folder_is_whole(folder):
    assert {path.name for path in folder.parent.iterdir()} == {"whole"}
    assert sorted(manifest.read(folder)) == ["a.txt", "part/b.txt"]
    # sha256 of "alpha", from sha256sum
    assert (
        manifest.read(folder)["a.txt"]
        == "8ed3f6ad685b959ead7022518e1af76cd816f8e8ec7ccdda1ed4018e8f2223f8"
    )
    manifest.check(folder)


def flip(file):
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def swap(a, b):
    one, other = a.read_bytes(), b.read_bytes()
    a.write_bytes(other), b.write_bytes(one)


DAMAGE = {
    "flip": (lambda f: flip(f / "a.txt"), "a.txt was changed"),
    "truncate": (lambda f: (f / "part" / "b.txt").write_text("bet"), "part/b.txt was changed"),
    "empty": (lambda f: (f / "a.txt").write_text(""), "a.txt was changed"),
    "delete": (lambda f: (f / "part" / "b.txt").unlink(), "part/b.txt is missing"),
    "swap": (lambda f: swap(f / "a.txt", f / "part" / "b.txt"), "a.txt was changed"),
    "add": (
        lambda f: (f / "part" / "evil.pt").write_text("x"),
        "part/evil.pt is not in manifest.json",
    ),
    "folder": (lambda f: ((f / "a.txt").unlink(), (f / "a.txt").mkdir()), "a.txt is missing"),
    "no manifest": (lambda f: (f / manifest.NAME).unlink(), "manifest.json cannot be read"),
    "cut manifest": (
        lambda f: (f / manifest.NAME).write_text('{"files": {"a.t'),
        "manifest.json cannot be read",
    ),
    "empty list": (
        lambda f: (f / manifest.NAME).write_text('{"files": {}}'),
        "a.txt is not in manifest.json",
    ),
    "no list": (
        lambda f: (f / manifest.NAME).write_text('{"files": [1]}'),
        "manifest.json is not a list",
    ),
    "a number": (lambda f: (f / manifest.NAME).write_text("7"), "manifest.json cannot be read"),
    "outside": (
        lambda f: (f / manifest.NAME).write_text('{"files": {"../x": "0"}}'),
        "manifest.json is not a list",
    ),
    "absolute": (
        lambda f: (f / manifest.NAME).write_text('{"files": {"/etc/passwd": "0"}}'),
        "is not a list",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_refused_by_file_name(folder, kind):
    damage, words = DAMAGE[kind]
    damage(folder)
    with pytest.raises(manifest.Damaged, match=words):
        manifest.check(folder)


def test_a_part_can_be_checked_alone(folder):
    flip(folder / "a.txt")
    manifest.check(folder, "part/")
    manifest.check(folder, share=slice(1, None, 2))
    with pytest.raises(manifest.Damaged):
        manifest.check(folder, "a")
    with pytest.raises(manifest.Damaged):
        manifest.check(folder, share=slice(0, None, 2))


def test_a_file_that_another_machine_wrote_elsewhere_is_noticed(tmp_path):
    (tmp_path / "draft").mkdir()
    with pytest.raises(FileNotFoundError, match="must be shared"):
        manifest.commit(tmp_path / "draft", tmp_path / "whole", {"rank-00001.safetensors": "0"})
    assert not (tmp_path / "whole").exists()


def test_a_committed_folder_replaces_its_namesake(folder):
    draft = folder.with_name("draft")
    draft.mkdir()
    (draft / "c.txt").write_text("gamma")
    manifest.commit(draft, folder, hashes_of(draft, [draft / "c.txt"]))
    assert json.loads((folder / manifest.NAME).read_text())["files"].keys() == {"c.txt"}
    assert {path.name for path in folder.parent.iterdir()} == {"whole"}


def test_removing_takes_the_name_first(folder, monkeypatch):
    def killed(path, **_):
        if path.exists():
            raise KeyboardInterrupt

    monkeypatch.setattr(manifest.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        manifest.remove(folder)
    assert {path.name for path in folder.parent.iterdir()} == {"whole.old.tmp"}


@pytest.mark.parametrize("name", ["manifest.json", "a.txt"])
@pytest.mark.parametrize("damage", ["pipe", "folder", "nested"])
def test_what_is_no_file_is_damage(folder, name, damage):
    """A pipe in the place of a file is not waited for."""
    file = folder / name
    file.unlink()
    {
        "pipe": lambda: os.mkfifo(file),
        "folder": file.mkdir,
        "nested": lambda: file.write_text("[" * 100_000),
    }[damage]()
    with pytest.raises(manifest.Damaged, match=name):
        manifest.check(folder)
