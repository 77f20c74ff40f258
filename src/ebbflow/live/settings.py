"""What a replica is told by whoever starts it: environment variables, each of which a script may override."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ebbflow.errors import ConfigError

__all__ = ["HEARTBEAT_TIMEOUT_MS", "PLEASE_RESTART", "Settings"]

HEARTBEAT_TIMEOUT_MS = 800
"""How long a replica's heart may pause before it counts as dead; the lighthouse's setting.

Hearts beat every 100 ms. Three replicas on two cores under a load of ten lost nobody in ten minutes with 700.
"""
PLEASE_RESTART = 75
"""Exit code (EX_TEMPFAIL) of a replica that wants to be started again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Where a replica finds its fleet, and where it keeps its files."""

    lighthouse: str
    """HOST:PORT of the lighthouse."""
    replica: str
    """Name of this replica, unique in the fleet; its record lies in the folder `replicas/<name>`."""
    folder: Path
    """Of the job: `replicas/<name>/record.jsonl`, `replicas/<name>/status.json`, `checkpoints/`."""
    job: str = "job"
    """Name of the job; a replica of another one is refused."""
    bind: str = "127.0.0.1"
    """The address that this replica listens on, and under which its peers reach it."""
    min_replicas: int = 1
    """Fewer replicas than this do not train."""
    heartbeat_timeout_ms: int = HEARTBEAT_TIMEOUT_MS

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.replica):
            raise ConfigError(
                f"the replica is called {self.replica!r}; expected letters, digits, dots and dashes, such as r2"
            )
        for name in ("min_replicas", "heartbeat_timeout_ms"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected 1 or more")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None, **overrides: object) -> Self:
        """What EBBFLOW_LIGHTHOUSE, EBBFLOW_REPLICA, EBBFLOW_FOLDER, ... say, unless overridden.

        >>> told = {"EBBFLOW_LIGHTHOUSE": "10.0.0.7:29510", "EBBFLOW_REPLICA": "r2", "EBBFLOW_FOLDER": "runs/a"}
        >>> Settings.from_environment(told, job="a").lighthouse
        '10.0.0.7:29510'
        """
        told = os.environ if environment is None else environment
        given = {key: value for key, value in overrides.items() if value is not None}
        values: dict[str, object] = {}
        for name in cls.__dataclass_fields__:
            text = told.get(f"EBBFLOW_{name.upper()}")
            if name in given:
                values[name] = given[name]
            elif text:
                values[name] = text
        missing = [name for name in ("lighthouse", "replica", "folder") if name not in values]
        if missing:
            variables = ", ".join(f"EBBFLOW_{name.upper()}" for name in missing)
            raise ConfigError(
                f"this replica was not told where its fleet is ({variables} not set): run the script with `ebbflow "
                f"launch --replicas 2 SCRIPT`, or pass {', '.join(missing)} to join()"
            )
        for name in ("min_replicas", "heartbeat_timeout_ms"):
            if isinstance(values.get(name), str):
                try:
                    values[name] = int(str(values[name]))
                except ValueError:
                    raise ConfigError(f"EBBFLOW_{name.upper()} is {values[name]!r}; expected a whole number") from None
        values["folder"] = Path(str(values["folder"]))
        return cls(**values)  # type: ignore[arg-type]

    @property
    def own_folder(self) -> Path:
        """Where this replica keeps its record and its status."""
        return self.folder / "replicas" / self.replica
