"""Importing optional packages, with an error that says why it failed and what to do."""

from __future__ import annotations

import importlib
from types import ModuleType

from ebbflow.errors import BrokenExtra, MissingExtra

__all__ = ["require"]


def require(module: str, *, extra: str, needed_for: str, package: str | None = None) -> ModuleType:
    """Import a module of an optional package, such as `torchft.manager` with the extra "live".

    Raises MissingExtra if the package itself is not installed, and BrokenExtra, which names the cause, if it is
    installed but fails to import. `needed_for` is the subject of the error message; `package` is the name that pip
    knows, where that differs from the name of the module.
    """
    top = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except Exception as error:  # packages raise all kinds of errors while they are imported
        if isinstance(error, ModuleNotFoundError) and error.name == top:
            raise MissingExtra(package or top, extra=extra, needed_for=needed_for) from None
        raise BrokenExtra(package or top, extra=extra, needed_for=needed_for, cause=error) from error
