"""What a run asks of the machine it is on: threads, numbers, and memory that suffices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ebbflow.errors import ConfigError

__all__ = ["cpu_settings", "enough_memory"]


@contextmanager
def enough_memory(device: str) -> Iterator[None]:
    """Say what to do when the device's memory, or the machine's, turns out not to suffice."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, (torch.OutOfMemoryError, MemoryError)) and "can't allocate memory" not in str(error):
            raise  # on a CPU torch has no class of its own for it
        reason = str(error).strip().partition("\n")[0][:200] or "out of memory"
        raise ConfigError(
            f"the memory of the device {device} does not suffice ({reason}): run fewer things on it at once (jobs of a "
            f"study), or use a smaller local batch, micro-batch or model, or precision bf16"
        ) from error


@contextmanager
def cpu_settings(threads: int) -> Iterator[None]:
    """Threads and denormal numbers as a run needs them; afterwards the process has its threads back, and denormal
    numbers, which are torch's default."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)  # denormals late in training slow a CPU down several times
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(before)
