"""`ebbflow rules`: the table, the page of one rule, its plot, and the cards of the documentation."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.answers import Ebbflow
from ebbflow.report.rule_pages import describe
from ebbflow.rules.rule import RULES, rule_entries

NAMES = [entry.name for entry in rule_entries() if entry.make.__module__.startswith("ebbflow.")]


def test_the_table_names_all_and_fits_eighty_columns(ebbflow: Ebbflow) -> None:
    lines = ebbflow("rules", width=80).text.splitlines()
    assert all(len(line) <= 80 for line in lines)
    words = {line.split()[0] for line in lines if line.strip()}
    assert set(NAMES) <= words
    assert {"Rules", "Modifiers"} <= words


def test_the_table_as_json_keeps_its_shape(ebbflow: Ebbflow) -> None:
    rows = {row["name"]: row for row in ebbflow("rules", "--json").json}
    assert rows["dynamic"] == {
        "name": "dynamic",
        "kind": "rule",
        "needs": [],
        "cite": "Lin et al. 2019, arXiv 1904.12043",
        "summary": "Dynamic SGD; stands for linear+ramp.",
    }
    assert rows["lena"]["needs"] == ["layers", "moments"]
    assert {row["kind"] for row in rows.values()} == {"rule", "modifier"}


@pytest.mark.parametrize("name", NAMES)
def test_the_page_of_a_rule_says_everything(ebbflow: Ebbflow, name: str) -> None:
    page = ebbflow("rules", "show", name, width=80).text
    assert all(len(line) <= 80 for line in page.splitlines())
    flat = " ".join(page.split())
    entry, about = RULES.entry(name), describe(RULES.entry(name))
    for part in (about.formula, about.suits, about.example, entry.cite, *about.needs):
        assert " ".join(part.split()) in flat
    assert all(doc in flat for _, _, doc in entry.parameters)
    assert "└──" in page, "there is a plot"


def test_an_unknown_name_is_refused(ebbflow: Ebbflow) -> None:
    ebbflow("rules", "show", "adascal").assert_refused("did you mean 'adascale'")


def test_show_draws_into_a_file(ebbflow: Ebbflow) -> None:
    assert ebbflow("rules", "show", "surge", "--out", "surge.png").code == 0
    assert Path("surge.png").read_bytes().startswith(b"\x89PNG")
    ebbflow("rules", "show", "surge", "--out", "surge.doc").assert_refused("expected .svg, .png, .pdf")


def test_cards_can_be_written_anywhere(ebbflow: Ebbflow) -> None:
    assert ebbflow("rules", "cards", "a/b").code == 0
    assert {f"{name}.md" for name in NAMES} | {"README.md"} <= {page.name for page in Path("a/b").iterdir()}
    Path("file").write_text("")
    ebbflow("rules", "cards", "file").assert_refused("cannot be created")


def test_json_is_refused_where_one_rule_is_described(ebbflow: Ebbflow) -> None:
    ebbflow("rules", "--json", "show", "lena").assert_refused("--json is for the list of rules")
