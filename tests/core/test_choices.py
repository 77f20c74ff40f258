"""choice.toml: what is written is read again, and a damaged file is named with what was expected."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbflow.core.choices import Choice, read_choice, write_choice
from ebbflow.errors import ConfigError


def test_a_choice_is_read_as_it_was_written(tmp_path: Path) -> None:
    choice = Choice(
        rule="linear+warmup(1.5ep, start=0)",
        lr=1e-05,
        decided_by="fallback",
        note='It says "no": Größe\n\t\\',
        source={"workload": "mine(width=8)", "epochs": 30, "base_lr": 0.5, "trace": 'C:\\a "b".csv'},
        ranking=({"place": 1, "score": 0.5}, {"place": 2, "score": -1.25e-7}),
    )
    write_choice(choice, tmp_path / "choice.toml")
    assert read_choice(tmp_path / "choice.toml") == choice


def test_what_is_not_known_is_left_out(tmp_path: Path) -> None:
    write_choice(Choice(rule="sqrt", lr=0.1, ranking=({"place": 1, "score": None},)), tmp_path / "choice.toml")
    assert read_choice(tmp_path / "choice.toml").ranking == ({"place": 1},)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("rule = ", "expected a choice.toml that `ebbflow choose` wrote"),
        ("lr = 0.1", "rule is None and lr is 0.1; expected a rule as a text and a base rate above 0"),
        ('rule = "sqrt"\nlr = -1', "lr is -1; expected"),
        ('rule = "sqrt"\nlr = true', "lr is True; expected"),
        ("", "is empty"),
    ],
)
def test_a_damaged_file_is_named_with_what_was_expected(content: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "choice.toml").write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"choice\.toml: ") as error:
        read_choice(tmp_path / "choice.toml")
    assert text in str(error.value)
    with pytest.raises(ConfigError, match="no such file"):
        read_choice(tmp_path / "none.toml")
