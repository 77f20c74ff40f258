"""The progress bar of a fit, as a callback of skorch."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from skorch.callbacks import Callback

__all__ = ["ProgressBar"]


class ProgressBar(Callback):  # type: ignore[misc]  # skorch has no types
    """Samples done, batch and loss, on standard error; silent unless the estimator's `verbose` is 1 or more."""

    def __init__(self) -> None:
        self._bar: Progress | None = None

    def on_train_begin(self, net: Any, **_: Any) -> None:
        """Nothing to show yet: the first step knows how many samples there will be."""
        self._close()

    def on_batch_end(self, net: Any, training: bool = False, **_: Any) -> None:
        """One step further."""
        if not net.verbose or not training:
            return
        if self._bar is None:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._task = self._bar.add_task("fit", total=net.total_samples_)
            self._bar.start()
        batch = net.history[-1, "batches", -1]
        text = f"epoch {len(net.history)}  batch {batch['train_batch_size']}  loss {batch['train_loss']:.4g}"
        self._bar.update(self._task, advance=batch["train_batch_size"], description=text)

    def on_train_end(self, net: Any, **_: Any) -> None:
        """Leave the bar as it stands."""
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_bar": None}  # a bar on a terminal cannot be pickled
