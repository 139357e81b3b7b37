"""The figures in the tables of recipes are the planner's, for the cards that each row names."""

import re

import pytest

from research.benchmarks import recipe_tables as script

LINK = "[recipe](../configs/wan21_1gpu_24gb_lora.yaml)"
HEAD = "| cards | recipe | whole run | price | when to stop |\n|---|---|---|---|---|\n"


@pytest.mark.parametrize(
    "page", script.PAGES, ids=lambda page: page.relative_to(script.ROOT).as_posix()
)
def test_the_pages_are_what_the_planner_says(page):
    text = page.read_text()
    assert script.refreshed(text) == text
    assert len([line for line in text.splitlines() if script.CARDS.search(line)]) >= 7


def test_every_recipe_for_gpus_is_in_the_decision_table():
    text = (script.ROOT / "docs" / "scaling.md").read_text()
    table = text.partition("## Which recipe for your cards")[2].partition("\n## ")[0]
    linked = set(re.findall(r"configs/(\w+)\.yaml", table))
    recipes = {path.stem for path in (script.ROOT / "configs").glob("*gpu*.yaml")}
    assert recipes - {"tiny_gpu"} <= linked


def test_a_stale_figure_is_made_anew_and_other_cells_stay():
    row = f"| 1 x RTX 4090 | {LINK} | 193 s | $1 | never |"
    header, rule, refreshed = script.refreshed(HEAD + row).splitlines()
    assert f"{header}\n{rule}\n" == HEAD
    cards, link, run, price, stop = script.cells(refreshed)
    assert (cards, link, stop) == ("1 x RTX 4090", LINK, "never")
    assert run.endswith(" days") and re.fullmatch(r"\$\d+", price) and price != "$1"


@pytest.mark.parametrize(
    ("cards", "recipe", "words"),
    [
        ("8 x H100", LINK, "written for 1 GPUs; its row names 8"),
        ("1 x RTX 4090", "[r](../configs/hunyuan15_1gpu_lora.yaml)", "does not fit the cards"),
    ],
)
def test_a_row_for_the_wrong_cards_is_refused(cards, recipe, words):
    with pytest.raises(ValueError, match=words):
        script.refreshed(f"{HEAD}| {cards} | {recipe} | - | - | - |")


def test_tables_of_other_things_are_left_alone():
    text = "| what | result |\n|---|---|\n| a run on 1 x H100 | good |\n"
    assert script.refreshed(text) == text
