"""Which modules of a model train and which are in eval mode: what the user has set holds, beside evaluations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["ModuleModes", "modes_kept"]


class ModuleModes:
    """Puts a model into training mode before a step, without touching modules that the user left in eval mode.

    Before the first step `model.train()` is called, which a model may have overridden; modules that were in eval mode
    while others trained, such as frozen batch norm, stay in it. From then on what is set between two steps holds. A
    model of which no module trains any more has been evaluated: all get the modes that they had in the step before.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._modules = [*model.modules()]  # model.modules() takes longer than all the rest here
        self.latest: list[bool] = []
        """The modes of all modules in the latest step; empty before the first one."""

    def train(self) -> None:
        """A step begins."""
        modes = _modes(self._modules)
        if not any(self.latest):
            self._model.train()
            if any(modes):
                now = _modes(self._modules)
                _set_modes(self._modules, [was and trains for was, trains in zip(modes, now, strict=True)])
        elif not any(modes):
            self.put_back()
        self.latest = _modes(self._modules)

    def put_back(self) -> None:
        """Give all modules the modes that they had in the latest step."""
        _set_modes(self._modules, self.latest)


@contextmanager
def modes_kept(model: Any) -> Iterator[None]:
    """A context after which every module of a model is in the mode in which it was before."""
    modules = [*model.modules()] if isinstance(model, torch.nn.Module) else []
    modes = _modes(modules)
    try:
        yield
    finally:
        _set_modes(modules, modes)


def _modes(modules: Sequence[torch.nn.Module]) -> list[bool]:
    return [module.training for module in modules]


def _set_modes(modules: Sequence[torch.nn.Module], modes: Sequence[bool]) -> None:
    """Set the mode of each module; a module comes after the one that it is a part of, whose mode it would get."""
    for module, mode in zip(modules, modes, strict=True):
        if module.training != mode:
            module.train(mode)  # some do more there, such as taking LoRA weights out of the others
    for module, mode in zip(modules, modes, strict=True):
        module.training = mode  # where `train` is overridden, or a module is a part of several
