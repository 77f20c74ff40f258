"""Plugin files: Python files that register rules, policies, traces, workloads and others of the user's own."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from ebbflow.errors import ConfigError, EbbflowError

__all__ = ["line_of", "load_plugins", "plugin_digests", "raise_naming", "raised_in_plugin"]

_DIGEST = "__sha256__"
"""The attribute of a plugin's module with the digest of the file as it was imported."""
_PREFIX = "ebbflow_plugin_"
"""How the names of the modules begin that plugins are imported as."""
_PACKAGE = str(Path(__file__).parents[1]) + os.sep


def load_plugins(paths: Iterable[str]) -> None:
    """Import Python files, each once per process, so that what they register can be used by name.

    A file that was edited after this process imported it is a ConfigError, since the old code would go on being used.
    """
    for text in paths:
        name = _module_name(text)
        if name in sys.modules:
            if Path(text).is_file() and _read(text)[1] != getattr(sys.modules[name], _DIGEST):
                raise ConfigError(
                    f"the plugin {text} was edited after this process had imported it, and its earlier code is still "
                    f"in use; start Python again"
                )
            continue
        content, digest = _read(text)
        path = Path(text).resolve()
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None:
            raise ConfigError(f"the plugin {text} is not a Python file; expected a name that ends in .py")
        module = importlib.util.module_from_spec(spec)
        setattr(module, _DIGEST, digest)
        sys.modules[name] = module
        try:
            exec(compile(content, path, "exec"), module.__dict__)  # exactly what the digest is of, not a cached .pyc
        except Exception as error:
            del sys.modules[name]
            where = line_of(error, str(path))
            raise ConfigError(
                f"the plugin {text} cannot be imported: {type(error).__name__}: {error}{where and f' ({where})'}"
            ) from error


def plugin_digests(paths: Iterable[str]) -> list[str]:
    """SHA-256 of each plugin as this process imported it, or as the file is now if it has not been imported."""
    return [getattr(sys.modules.get(_module_name(text)), _DIGEST, None) or _read(text)[1] for text in paths]


def line_of(error: BaseException, file: str) -> str:
    """The innermost line of an error's traceback that is in the file, which is the user's; empty if none is."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f"{file}:{frames[-1].lineno}, in {frames[-1].name}" if frames else ""


def raise_naming(error: Exception, part: Any, what: str) -> NoReturn:
    """Raise an exception of a part of the user's own as a ConfigError: what raised it, and in which line.

    What Ebbflow raises on purpose stays as it is, and so do a memory or a device that fails (torch has types of its own
    for them), which are no mistake of the part. So does an exception in a part of Ebbflow: that is our defect, of which
    the whole traceback is wanted.
    """
    ours = str(part.__module__).partition(".")[0] == "ebbflow"
    if ours or not _is_mistake(error):
        raise error
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    theirs = [file for file in files if not file.startswith(("<string>", _PACKAGE))]
    where = line_of(error, theirs[0]) if theirs else ""
    raise ConfigError(f"{what} raised {type(error).__name__}: {error}{where and f' ({where})'}") from error


def raised_in_plugin(error: Exception) -> str:
    """What an exception says, and the line of the plugin that raised it; empty if it was not raised by a plugin.

    This is for what no `raise_naming` has named, such as a loss, a model or a method of an engine. Of the plugins and
    Ebbflow the innermost one counts: where a plugin calls Ebbflow, and the exception is raised there, the whole
    traceback is wanted. What a library raises belongs to the plugin that called it.
    """
    if not _is_mistake(error):
        return ""
    plugins = {str(module.__file__) for name, module in [*sys.modules.items()] if name.startswith(_PREFIX)}
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    known = [file for file in files if file in plugins or file.startswith(_PACKAGE)]
    if not known or known[-1] not in plugins:
        return ""
    return f"{type(error).__name__}: {error} ({line_of(error, known[-1])})"


def _is_mistake(error: Exception) -> bool:
    """Whether an exception is a mistake of the part that raised it; see `raise_naming`."""
    by_torch = "torch" in type(error).__module__.split(".")
    return not (by_torch or isinstance(error, EbbflowError | MemoryError))


def _module_name(text: str) -> str:
    return f"{_PREFIX}{hashlib.sha256(str(Path(text).resolve()).encode()).hexdigest()[:12]}"


def _read(text: str) -> tuple[bytes, str]:
    """The content of a plugin and its digest."""
    try:
        content = Path(text).read_bytes()
    except OSError as error:
        problem = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
        raise ConfigError(f"the plugin {text} {problem}; expected a Python file") from None
    return content, hashlib.sha256(content).hexdigest()
