"""What a run says at its start and at its end."""

import os
import shlex
import shutil
import sys
import webbrowser
from contextlib import closing
from pathlib import Path

import pytest

from generate import parse_arguments
from sage_grpo.train import console


def said(text):
    """Text by name."""
    return {line[:12].strip(): line[12:] for line in text.splitlines()}


def test_the_banner_says_what_is_about_to_run(make, flags, tmp_path, capfd):
    asked = {"max_steps": 9, "save_interval": 4, "save_minutes": 15, "validation_interval": 6}
    trainer = make(
        **asked, validate_at_step0=True, num_validation_prompts=2, gradient_accumulation_steps=1
    )
    console.begin(trainer)
    found = said(capfd.readouterr().out)
    count = sum(p.numel() for p in trainer.backbone.transformer.parameters())
    trained = sum(p.numel() for p in trainer.optimization.parameters.values())
    assert found["run"] == f"{trainer.run.path}, iteration 0 of 9"
    assert found["model"].endswith(f": {trained:,} of {count:,} parameters are trained, fp32")
    assert found["machine"] == "1 x CPU: 1 data-parallel x 1 sequence-parallel"
    c = trainer.config
    assert found["update"].startswith(
        f"{c.batch_size // c.num_generations} prompts x {c.num_generations} clips of 5 "
    )
    assert f"; {c.sde_type}, eta {c.eta:g}, window {c.sde_window}" in found["update"]
    assert found["reward"] == "0.5 VQ + 0.5 MQ + 1 TA (shapes)"
    assert found["checkpoint"] == "after iteration 4, or every 15 minutes"
    assert found["validation"].startswith("now and after iteration 6: 2 clips of ")
    assert "\033" not in "".join(found)


def test_settings_that_do_less_than_they_seem_to_are_noted_at_the_start(make, capfd):
    console.begin(make(gpus=2, sp_size=1))
    assert (
        "note: it is meant for 2 rank(s) and there are 1: an iteration has"
        in capfd.readouterr().err
    )


def test_a_resumed_run_says_so_and_what_comes_next(make, tmp_path):
    make(max_steps=2, save_interval=0).train()
    trainer = make(
        max_steps=7, save_interval=5, validation_interval=0, resume_from_checkpoint="auto"
    )
    found = said(console.banner(trainer))
    assert found["run"].endswith("iteration 2 of 7, resumed from step-000002")
    assert found["checkpoint"] == "after iteration 5" and found["validation"].startswith(
        "after iteration 7: "
    )


def test_the_end_names_the_checkpoint_and_the_next_command(make, flags):
    trainer = make(max_steps=1)
    trainer.train()
    found = said(console.ending(trainer))
    assert (
        found["checkpoint"].endswith("checkpoints/step-000001")
        and Path(found["checkpoint"]).is_dir()
    )
    python, program, *words = shlex.split(found["next"])
    assert (python, program) == ("python", "generate.py")
    args = parse_arguments(words)
    assert (args.checkpoint_path, str(args.model_path)) == (
        str(trainer.run.path),
        flags["pretrained_model_root"],
    )
    assert args.prompt == trainer.validation.requests[0].text and args.image is None
    assert "report" not in found  # it was not written
    (trainer.run.path / "report.html").write_text("<p>")
    *_, last = console.ending(trainer).splitlines()
    assert last.split() == ["report", str(trainer.run.path / "report.html")]


@pytest.mark.parametrize("steps, solver", [(2, "dpm"), (20, "euler")])
def test_the_next_command_samples_as_the_run_did(make, steps, solver):
    """20 steps are the model's own; what was gained in two may not show in them."""
    trainer = make(validation_num_inference_steps=steps, validation_solver=solver, max_steps=1)
    trainer.train()
    trainer.run.close()
    args = parse_arguments(shlex.split(said(console.ending(trainer))["next"])[2:])
    own_steps = trainer.backbone.sampling.num_steps
    assert (args.num_inference_steps or own_steps) == steps
    assert args.solver == solver


class Keyboard:
    """Standard input of a terminal on which something was typed, or nothing."""

    def __init__(self, typed):
        self.reader, self.writer = os.pipe()
        if typed is not None:
            os.write(self.writer, typed.encode())
        self.file = os.fdopen(self.reader)

    def isatty(self):
        return True

    def fileno(self):
        return self.reader

    def readline(self):
        return self.file.readline()

    def close(self):
        self.file.close()
        os.close(self.writer)


@pytest.mark.parametrize(
    "typed, terminal, desktop, opened",
    [
        ("\n", True, True, True),
        ("y\n", True, True, True),
        ("n\n", True, True, False),
        (None, True, True, False),  # nobody is there
        ("\n", False, True, False),
        ("\n", True, False, False),
    ],
)
def test_the_report_is_offered_in_a_terminal_on_a_desktop_alone(
    typed, terminal, desktop, opened, monkeypatch, tmp_path, capsys
):
    page = tmp_path / "report.html"
    page.write_text("<p>")
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {tmp_path}/opened\n')
    browser.chmod(0o755)
    monkeypatch.setattr(webbrowser, "_tryorder", None)  # which it reads from the environment once
    monkeypatch.setenv("BROWSER", f"{browser} %s")
    monkeypatch.setenv("DISPLAY", ":0" if desktop else "")
    monkeypatch.setenv("WAYLAND_DISPLAY", "")
    monkeypatch.setattr(console, "PATIENCE", 0.01)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)

    with closing(Keyboard(typed)) as keyboard:
        monkeypatch.setattr(sys, "stdin", keyboard)
        console.offer_report(page)
    asked = capsys.readouterr().out
    assert asked.startswith("Open ") if terminal and desktop else not asked
    assert (tmp_path / "opened").is_file() is opened
    if opened:
        assert (tmp_path / "opened").read_text().strip() == page.as_uri()


def test_a_browser_that_cannot_be_opened_is_a_note(monkeypatch, tmp_path, capsys):
    page = tmp_path / "report.html"
    page.write_text("<p>")

    def fail(address):
        raise webbrowser.Error("could not locate runnable browser")

    monkeypatch.setattr(webbrowser, "open", fail)
    monkeypatch.setattr(console, "has_desktop", lambda: True)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    with closing(Keyboard("y\n")) as keyboard:
        monkeypatch.setattr(sys, "stdin", keyboard)
        console.offer_report(page)
    assert "could not locate runnable browser" in capsys.readouterr().err


def test_a_run_without_an_iteration_names_no_checkpoint(make):
    trainer = make(max_steps=0)
    trainer.train()
    assert said(console.ending(trainer)) == {"checkpoint": "none, as max_steps is 0"}
    assert not list(trainer.run.checkpoints.glob("*"))


def test_the_next_command_names_image_and_version(
    make, i2v_folder, tiny_folder, pictures, tmp_path
):
    folder = shutil.copytree(i2v_folder, tmp_path / "both")
    shutil.copy(tiny_folder / "model_index.json", folder)
    prompts = tmp_path / "images.csv"
    pictures = [shutil.copy(path, tmp_path) for path in pictures[:2]]
    prompts.write_text(f"prompt,image\na red circle,{pictures[0]}\na green square,{pictures[1]}\n")
    files = dict.fromkeys(("train_prompts", "validation_prompts"), (str(prompts),))
    trainer = make(pretrained_model_root=str(folder), pretrained_transformer_version="i2v", **files)
    (trainer.run.checkpoints / "step-000000").mkdir(parents=True)
    args = parse_arguments(shlex.split(said(console.ending(trainer))["next"])[2:])
    assert (args.model_path, args.pretrained_transformer_version, args.image) == (
        folder,
        "i2v",
        Path(pictures[0]),
    )


@pytest.mark.parametrize("terminal", [True, False])
def test_names_are_bold_on_a_terminal_alone(monkeypatch, terminal):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    assert console.table({"run": "here"}) == (
        "\033[1mrun         \033[0mhere" if terminal else "run         here"
    )
