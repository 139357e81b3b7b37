"""A committed folder is either unchanged or rejected with the name of a file."""

import json
import os
import re
from pathlib import Path

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
    hashes = manifest.read(folder)
    assert sorted(hashes) == ["a.txt", "part/b.txt"]
    sha256sum_of_alpha = "8ed3f6ad685b959ead7022518e1af76cd816f8e8ec7ccdda1ed4018e8f2223f8"
    assert hashes["a.txt"] == sha256sum_of_alpha
    manifest.check(folder)


def flip(file):
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def swap(first, second):
    before = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(before)


def replace_by_folder(file):
    file.unlink()
    file.mkdir()


def write_manifest(text):
    return lambda folder: (folder / manifest.NAME).write_text(text)


DAMAGE = {  # what is done to a folder, and what the error says
    "flip": (lambda f: flip(f / "a.txt"), "a.txt was changed"),
    "truncate": (lambda f: (f / "part" / "b.txt").write_text("bet"), "part/b.txt was changed"),
    "empty": (lambda f: (f / "a.txt").write_text(""), "a.txt was changed"),
    "delete": (lambda f: (f / "part" / "b.txt").unlink(), "part/b.txt is missing"),
    "swap": (lambda f: swap(f / "a.txt", f / "part" / "b.txt"), "a.txt was changed"),
    "add": (
        lambda f: (f / "part" / "evil.pt").write_text("x"),
        "part/evil.pt is not in manifest.json",
    ),
    "folder": (lambda f: replace_by_folder(f / "a.txt"), "a.txt is missing"),
    "no manifest": (lambda f: (f / manifest.NAME).unlink(), "manifest.json cannot be read"),
    "cut manifest": (write_manifest('{"files": {"a.t'), "manifest.json cannot be read"),
    "empty list": (write_manifest('{"files": {}}'), "a.txt is not in manifest.json"),
    "no list": (write_manifest('{"files": [1]}'), "manifest.json is not a list"),
    "a number": (write_manifest("7"), "manifest.json cannot be read"),
    "outside": (write_manifest('{"files": {"../x": "0"}}'), "manifest.json is not a list"),
    "absolute": (write_manifest('{"files": {"/etc/passwd": "0"}}'), "is not a list"),
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
    (left,) = folder.parent.iterdir()
    assert re.fullmatch(r"whole\.old\.[0-9a-f]{32}\.tmp", left.name)


@pytest.mark.parametrize("name", ["manifest.json", "a.txt"])
@pytest.mark.parametrize(
    "replacement",
    [os.mkfifo, Path.mkdir, lambda file: file.write_text("[" * 100_000)],
    ids=["pipe", "folder", "nested"],
)
def test_what_is_not_the_file_is_damage(folder, name, replacement):
    """A pipe in the place of a file is not waited for."""
    file = folder / name
    file.unlink()
    replacement(file)
    with pytest.raises(manifest.Damaged, match=name):
        manifest.check(folder)


def test_a_linked_folder_counts_as_added(folder, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "key").write_text("secret")
    (folder / "more").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(manifest.Damaged, match=r"more is not in manifest\.json"):
        manifest.check(folder)


def test_a_linked_file_counts_as_changed(folder, tmp_path):
    (folder / "a.txt").rename(tmp_path / "same")
    (folder / "a.txt").symlink_to(tmp_path / "same")
    with pytest.raises(manifest.Damaged, match=r"a\.txt was changed"):
        manifest.check(folder)


def new_draft(folder):
    """A draft with one file, and its hashes."""
    draft = folder / "draft"
    draft.mkdir()
    (draft / "c.txt").write_text("gamma")
    return draft, hashes_of(draft, [draft / "c.txt"])


@pytest.mark.parametrize("target", ["precious", "nowhere"])
def test_a_link_in_place_of_a_folder_is_replaced_and_what_it_leads_to_stays(tmp_path, target):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("precious")
    (tmp_path / "whole").symlink_to(tmp_path / target)
    draft, hashes = new_draft(tmp_path)
    manifest.commit(draft, tmp_path / "whole", hashes)
    assert not (tmp_path / "whole").is_symlink()
    assert (tmp_path / "whole" / "c.txt").read_text() == "gamma"
    assert {path.name for path in tmp_path.iterdir()} == {"precious", "whole"}
    assert (tmp_path / "precious" / "file").read_text() == "precious"


def test_no_name_that_somebody_may_have_is_taken_for_a_draft(folder, tmp_path):
    (tmp_path / "whole.old.tmp").mkdir()
    (tmp_path / "whole.old.tmp" / "precious").write_text("precious")
    draft, hashes = new_draft(tmp_path)
    manifest.commit(draft, folder, hashes)
    manifest.check(folder)
    assert {path.name for path in tmp_path.iterdir()} == {"whole", "whole.old.tmp"}
    assert (tmp_path / "whole.old.tmp" / "precious").read_text() == "precious"
