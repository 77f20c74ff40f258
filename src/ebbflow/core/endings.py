"""How a command, a run or a fleet ends: one word, one exit code and one line for each.

| exit code | word         | when |
|----------:|:-------------|:-----|
| 0         | finished     | all epochs (or `max_steps`) are done and the final state is saved |
| 1         | failed       | an error, but not of the input: an exception in a script, a full disk, a lost process |
| 2         | wrong input  | an option, a file or a setting cannot be used; nothing was trained |
| 3         | stopped      | a signal (Ctrl-C, SIGTERM); what was done is saved, and the same command continues |
| 4         | incomplete   | ended without an error before all epochs were done, or the final state was not saved |
| 5         | diverged     | the loss or the gradient is no longer finite; the same command would do the same again |

Exit code 0 is given in the first case only. A script that a launcher runs may exit with any code: the launcher judges
by the status files and checkpoints in the folder of the job.
"""

from __future__ import annotations

from enum import Enum
from typing import Self

from ebbflow.errors import Diverged, InputError, OutputError

__all__ = ["Ending"]


class Ending(Enum):
    """An ending, with its exit `code`, its `word` and the `line` that explains it."""

    FINISHED = (0, "finished", "all epochs are done and the final state is saved")
    FAILED = (1, "failed", "an error ended it; the log and the lines above say which")
    WRONG_INPUT = (2, "wrong input", "an input cannot be used; the message says which and what to do")
    STOPPED = (3, "stopped", "not finished; the same command continues")
    INCOMPLETE = (4, "incomplete", "it ended before all epochs were done, or without saving the final state")
    DIVERGED = (5, "diverged", "the loss or the gradient is no longer finite; use a smaller learning rate or a warm-up")

    def __init__(self, code: int, word: str, line: str) -> None:
        self.code = code
        """Exit code of the command."""
        self.word = word
        self.line = line
        """The reason in one line, where nothing more particular is known."""

    @classmethod
    def named(cls, word: str) -> Self:
        """The ending of this word.

        >>> Ending.named("diverged").code
        5
        """
        return next(ending for ending in cls if ending.word == word)

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """How an exception that nobody handles ends a command.

        A folder that cannot be written is wrong input; `train` calls it a failure once training has begun, and a
        replica asks its launcher to be started again.

        >>> from ebbflow.errors import ConfigError, RankLost
        >>> [Ending.of(error).word for error in (ConfigError(""), RankLost(""), KeyboardInterrupt())]
        ['wrong input', 'failed', 'stopped']
        """
        if isinstance(error, KeyboardInterrupt):
            return cls.STOPPED
        if isinstance(error, Diverged):
            return cls.DIVERGED
        return cls.WRONG_INPUT if isinstance(error, InputError | OutputError | ImportError) else cls.FAILED
