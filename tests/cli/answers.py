"""What a run of the command gives."""

from __future__ import annotations

import json
from typing import Any, NamedTuple, Protocol


class Answer(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        """Standard output of a command that succeeded."""
        assert self.code == 0, self.err
        return self.out

    @property
    def json(self) -> Any:
        """The JSON on standard output of a command that succeeded."""
        return json.loads(self.text)

    def assert_refused(self, *messages: str) -> None:
        """Bad input: one message with these parts, exit code 2, no traceback."""
        assert self.code == 2, self
        assert "Traceback" not in self.err
        for message in messages:
            assert message in self.err


class Ebbflow(Protocol):
    def __call__(self, *arguments: object, width: int = 10_000) -> Answer:
        """Run the command with these arguments, in a terminal of so many columns."""
