"""What is used of torchft is there, and what is missing is named."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("torchft", reason="the live extra is not installed")

from ebbflow.live.torchft_api import SUPPORTED_VERSION, load_compiled_part, missing_members


def test_the_installed_torchft_is_the_supported_one_and_has_all_that_is_used() -> None:
    version = importlib.metadata.version("torchft")
    missing = missing_members(load_compiled_part())
    assert not missing, f"torchft {version} lacks {missing}: adapt ebbflow.live.torchft_api"
    assert version == SUPPORTED_VERSION, "pyproject.toml and ebbflow.live.torchft_api name different versions"


def test_the_project_asks_for_the_supported_version() -> None:
    project = Path(__file__).resolve().parents[2] / "pyproject.toml"
    assert f'"torchft=={SUPPORTED_VERSION}"' in project.read_text()


@pytest.mark.process
def test_torchft_itself_can_be_imported_after_its_compiled_part() -> None:
    code = """
        from ebbflow.live.torchft_api import load_compiled_part
        part = load_compiled_part()
        import sys
        assert "torch" not in sys.modules
        from torchft import ProcessGroupNCCL, _torchft
        assert _torchft is part
    """
    subprocess.run([sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)], check=True)


def load_from(folder: Path, code: str) -> str:
    """What Python says that loads torchft from a folder and from nowhere else."""
    script = f"""
        import sys
        sys.path[:] = [path for path in sys.path if "site-packages" not in path]
        sys.path.insert(0, {str(folder)!r})
        from ebbflow.live import torchft_api
        try:
            {code}
        except Exception as error:
            print(type(error).__name__, error)
    """
    command = [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {_source()!r})\n" + textwrap.dedent(script)]
    return subprocess.run(command, check=True, text=True, capture_output=True).stdout


def _source() -> str:
    import ebbflow

    return str(Path(ebbflow.__file__).parents[1])


@pytest.mark.process
def test_a_torchft_that_is_not_installed_is_a_missing_extra(tmp_path: Path) -> None:
    answer = load_from(tmp_path, "torchft_api.load_compiled_part()")
    assert answer.startswith("MissingExtra a live fleet needs torchft, which is not installed; run: pip install")


@pytest.mark.process
@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"__init__.py": ""}, "it has no compiled part"),
        ({"__init__.py": "", "_torchft.so": "not a library"}, "_torchft.so: "),
    ],
)
def test_a_damaged_torchft_is_named_with_the_cause(tmp_path: Path, files: dict[str, str], reason: str) -> None:
    (tmp_path / "torchft").mkdir()
    for name, text in files.items():
        (tmp_path / "torchft" / name).write_text(text)
    answer = load_from(tmp_path, "torchft_api.load_compiled_part()")
    assert answer.startswith("BrokenExtra a live fleet needs torchft, which is installed but cannot be imported: ")
    assert reason in answer


@pytest.mark.process
def test_a_missing_dependency_of_torchft_is_named(tmp_path: Path) -> None:
    (tmp_path / "torchft").mkdir()
    (tmp_path / "torchft" / "__init__.py").write_text("import opentelemetry.nothing")
    code = "torchft_api.load_compiled_part = lambda: None; torchft_api.nccl_group(None, 0, 2, None)"
    answer = load_from(tmp_path, code)
    assert "No module named 'opentelemetry'" in answer
    assert answer.startswith("BrokenExtra a fleet of GPUs needs torchft, which is installed but cannot be imported")
