"""Plugin files: Python files that register rules, policies, traces, workloads and others of the user's own."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path

from ebbflow.errors import ConfigError

__all__ = ["load_plugins"]


def load_plugins(paths: Iterable[str]) -> None:
    """Import Python files, each once per process, so that what they register can be used by name."""
    for text in paths:
        path = Path(text).resolve()
        name = f"ebbflow_plugin_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
        if name in sys.modules:
            continue
        if not path.is_file():
            raise ConfigError(f"the plugin {text} does not exist; expected a Python file")
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ConfigError(f"the plugin {text} is not a Python file; expected a name that ends in .py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[name]
            raise ConfigError(f"the plugin {text} cannot be imported: {type(error).__name__}: {error}") from error
