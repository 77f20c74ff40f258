"""What the tests of the report share."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ebbflow.report.report_page import ReportPaths, write_report
from report.written_study import study as study
from report.written_study import write_record


@pytest.fixture(scope="session")
def make_record() -> Callable[..., Path]:
    """`write_record`: a record with chosen last validations, status and statistics."""
    return write_record


@pytest.fixture(scope="session")
def report(study: Path, tmp_path_factory: pytest.TempPathFactory) -> ReportPaths:
    """The report of the study, written once."""
    return write_report(study, out=tmp_path_factory.mktemp("page") / "report")


@pytest.fixture(scope="session")
def browser() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    pytest.skip("no Chromium on this machine: the page is not opened in a browser (apt-get install chromium)")
