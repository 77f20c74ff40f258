"""Whether a choice of `ebbflow choose` suits the run that takes it over."""

from __future__ import annotations

from ebbflow.core.choices import Choice
from ebbflow.errors import ConfigError
from ebbflow.rules.families import optimizer_family

__all__ = ["check_choice"]


def check_choice(choice: Choice, *, origin: str, optimizer: str, named: str, ref_batch: int | None) -> list[str]:
    """What the user of a choice should know, in sentences without a full stop.

    `optimizer`: that of the run; `named` and the source's by the names of their families. A ConfigError if the choice
    was made for an optimizer of another family, to which its base rate and its rule mean something else.
    """
    source, found = choice.source, []
    family = source.get("optimizer_family") or (
        optimizer_family(source["optimizer"]) if "optimizer" in source else None
    )
    if family not in (None, optimizer_family(named)):
        raise ConfigError(
            f"{origin}: rule {choice.rule} and base rate {choice.lr:g} were chosen for {source['optimizer']}, but the "
            f"optimizer is {optimizer}, to which they mean something else; choose again with this optimizer, or leave "
            f"the choice out"
        )
    if choice.decided_by == "fallback":
        found.append(f"nothing was decided, and this is the fallback: {choice.note.rstrip('.')}")
    before = source.get("ref_batch")
    if ref_batch is not None and before not in (None, ref_batch):
        found.append(
            f"the base rate was chosen for a reference batch of {before}, and here it is {ref_batch}: give the same "
            f"one, or choose again"
        )
    return found
