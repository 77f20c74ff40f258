"""All exceptions that Ebbflow raises on purpose, as one small tree.

    EbbflowError
    |-- InputError            an input of the user cannot be used      (also a ValueError)
    |   |-- UnitError         "90s", "5ep": a quantity without or with the wrong unit
    |   |-- SpecError         the text form: unknown name, wrong or missing argument
    |   |-- TraceError        an availability trace: file or definition
    |   |-- PlanError         a batch plan: too short, impossible batch
    |   |-- ConfigError       a study file, a setting, a combination of settings
    |   |   `-- CodeChanged   a run in the folder was made by other code than is loaded now
    |   |-- DataError         a data set that is missing or not of the expected form
    |   |-- RecordError       a record that cannot be read
    |   `-- CheckpointError   a checkpoint of another run, or a damaged one
    |       `-- UnreadableCheckpoints   there are checkpoints, and none of them can be read
    |-- LedgerError           a step that would lose or repeat a sample; a bug of ours or of an engine
    |-- OutputError           the disk is full, the folder is read-only  (also an OSError)
    |-- StorageUnreachable    a disk or bucket does not answer now       (also an OSError)
    |-- RankLost              another process of this run has ended
    |-- Diverged              the loss or the gradient is no longer finite
    |-- MissingExtra          an optional package is not installed         (also an ImportError)
    `-- BrokenExtra           an optional package fails to import          (also an ImportError)

Every message says what was found, what was expected and what to do. The command prints the message without a traceback
and exits with the code of `core.endings.Ending`: 2 for an InputError, an OutputError or a missing package, 5 for
Diverged, else 1.
"""

from __future__ import annotations

__all__ = [
    "BrokenExtra", "CheckpointError", "CodeChanged", "ConfigError", "DataError", "Diverged", "EbbflowError",
    "InputError", "LedgerError", "MissingExtra", "OutputError", "PlanError", "RankLost", "RecordError", "SpecError",
    "StorageUnreachable", "TraceError", "UnitError", "UnreadableCheckpoints",
]  # fmt: skip


class EbbflowError(Exception):
    """Base class of everything that Ebbflow raises on purpose."""


class InputError(EbbflowError, ValueError):
    """An input of the user cannot be used."""


class UnitError(InputError):
    """A quantity without a unit, or with one that does not fit."""


class SpecError(InputError):
    """The text form of a rule, policy, trace, schedule or optimizer cannot be understood."""


class TraceError(InputError):
    """An availability trace, a file or a definition, cannot be used."""


class PlanError(InputError):
    """A batch plan is impossible or does not reach far enough."""


class ConfigError(InputError):
    """A setting, or a combination of settings, cannot be used."""


class CodeChanged(ConfigError):
    """A run in the folder was made by other code: another plugin, number of parameters or recipe."""


class DataError(InputError):
    """A data set is missing or does not have the expected form."""


class RecordError(InputError):
    """A record cannot be read."""


class CheckpointError(InputError):
    """A checkpoint is damaged or belongs to another run."""


class UnreadableCheckpoints(CheckpointError):
    """There are checkpoints, and all of them are damaged or of an earlier version."""


class LedgerError(EbbflowError):
    """A step would lose or repeat a sample. This is an error in Ebbflow or in an engine: please report it."""


class OutputError(EbbflowError, OSError):
    """A result cannot be written."""


class StorageUnreachable(EbbflowError, OSError):
    """A disk or bucket with checkpoints cannot be used now: it is full, not mounted or not reachable."""


class RankLost(EbbflowError):
    """Another process of this run has ended, so that this one cannot continue."""

    def __init__(self, message: str, *, reported: bool = False) -> None:
        super().__init__(message)
        self.reported = reported
        """Whether that process, or another one, has printed the reason."""


class Diverged(EbbflowError):
    """The loss or the gradient stopped being finite; the run ends and says so in its record.

    >>> raise Diverged("the training loss is nan at step 7")
    Traceback (most recent call last):
    ...
    ebbflow.errors.Diverged: the training loss is nan at step 7; use a smaller learning rate, a warm-up, ...
    """

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}; use a smaller learning rate, a warm-up, or inputs on a smaller scale")


class MissingExtra(EbbflowError, ImportError):
    """An optional package is not installed.

    >>> raise MissingExtra("torchft", extra="live", needed_for="ebbflow launch")
    Traceback (most recent call last):
    ...
    ebbflow.errors.MissingExtra: ebbflow launch needs torchft, which is not installed; run: pip install 'ebbflow[live]'
    """

    def __init__(self, package: str, *, extra: str, needed_for: str) -> None:
        super().__init__(f"{needed_for} needs {package}, which is not installed; run: pip install 'ebbflow[{extra}]'")


class BrokenExtra(EbbflowError, ImportError):
    """An optional package is installed, but fails to import, for example because one of its dependencies is missing."""

    def __init__(self, package: str, *, extra: str, needed_for: str, cause: Exception) -> None:
        super().__init__(
            f"{needed_for} needs {package}, which is installed but cannot be imported: {type(cause).__name__}: "
            f"{cause}; correct this, or reinstall it: pip install --force-reinstall 'ebbflow[{extra}]'"
        )
