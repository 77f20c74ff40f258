"""Optional packages: one that is not installed and one that fails to import are different errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbflow.core.extras import require
from ebbflow.errors import BrokenExtra, EbbflowError, MissingExtra


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path of modules."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_an_installed_package_is_imported(packages: Path) -> None:
    (packages / "ebb_whole").mkdir()
    (packages / "ebb_whole" / "__init__.py").write_text("")
    (packages / "ebb_whole" / "part.py").write_text("x = 3")
    assert require("ebb_whole.part", extra="live", needed_for="this test").x == 3


def test_a_package_that_is_not_installed_names_the_pip_command() -> None:
    message = r"this test needs ebb-absent, which is not installed; run: pip install 'ebbflow\[live\]'"
    with pytest.raises(MissingExtra, match=message):
        require("ebb_absent.part", extra="live", needed_for="this test", package="ebb-absent")


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        ("import ebb_dependency", "ModuleNotFoundError: No module named 'ebb_dependency'"),
        ("from ebb_broken import nothing", "ImportError: cannot import name 'nothing'"),
        ("raise RuntimeError('operator nms does not exist')", "RuntimeError: operator nms does not exist"),
        ("raise OSError('libfoo.so: cannot open')", "OSError: libfoo.so: cannot open"),
    ],
)
def test_a_package_that_fails_to_import_names_the_cause(content: str, cause: str, packages: Path) -> None:
    (packages / "ebb_broken.py").write_text(content)
    message = f"this test needs ebb_broken, which is installed but cannot be imported: {cause}"
    with pytest.raises(BrokenExtra, match=message) as raised:
        require("ebb_broken", extra="live", needed_for="this test")
    assert not isinstance(raised.value, MissingExtra)
    assert isinstance(raised.value, EbbflowError)
    assert raised.value.__cause__ is not None


def test_a_missing_part_of_an_installed_package_is_not_a_missing_package(packages: Path) -> None:
    (packages / "ebb_old").mkdir()
    (packages / "ebb_old" / "__init__.py").write_text("")
    with pytest.raises(BrokenExtra, match=r"No module named 'ebb_old\.newer'"):
        require("ebb_old.newer", extra="live", needed_for="this test")
