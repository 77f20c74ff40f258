"""When a failure is not that of a lost peer: it repeats with the same replicas, although all of them are there."""

from __future__ import annotations

from collections.abc import Collection

__all__ = ["RepeatedFailures"]

_EXPLAIN_AT = 3  # failures; from then on there are pauses, too
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 1.0
_MAX_BACKEND_FAILURES = 5  # which say that they have nothing to do with a connection
_MAX_FAILURES = 10  # of any kind, if they last for as long as this:
_MAX_FAILING_S = 120.0  # from the first failure on, after which one side of a cut link is left out within 40 s


class RepeatedFailures:
    """Failures of steps and of groups with the same replicas, without a committed step between.

    A peer that was lost is missing in the next quorum, and one behind a cut link or a firewall is left out of it, if
    most of the others reach each other. Whatever fails again and again with the same replicas while all of them send
    heartbeats and answer, such as NCCL with two of them on one GPU, or gloo with a firewall between any two, would fail
    for ever. The message of gloo can look like that of a lost connection. So it does not decide whether the fleet gives
    up, only how soon.
    """

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()
        """The replicas with which it failed."""
        self.reason = ""
        """What was said of the last failure."""
        self.hopeless = False
        """Whether it is certain that it will fail for ever."""
        self._number = self._of_backend = 0
        self._since = 0.0

    def add(self, names: tuple[str, ...], reason: str, now: float, *, backend: bool) -> None:
        """Count a failure; `backend`: whether the backend says that it has nothing to do with a connection."""
        if names != self.names or not self._number:
            self.forget()
            self.names, self._since = names, now
        self.reason = reason
        self._number += 1
        self._of_backend += backend
        lasts = self._number >= _MAX_FAILURES and now - self._since >= _MAX_FAILING_S
        self.hopeless = lasts or self._of_backend >= _MAX_BACKEND_FAILURES

    def forget(self) -> None:
        """A step was committed, or a replica cannot be reached: what failed until now has another reason."""
        self._number = self._of_backend = 0
        self.hopeless = False

    @property
    def explanation_due(self) -> bool:
        """Whether it is time to say why this replica does not go on."""
        return self._number == _EXPLAIN_AT

    @property
    def pause_s(self) -> float:
        """How long to wait before the next attempt: not at all after a few failures, as when replicas die."""
        if self._number < _EXPLAIN_AT:
            return 0.0
        return min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** (self._number - _EXPLAIN_AT))

    def ends_with(self, names: tuple[str, ...], hopeless: Collection[bool]) -> bool:
        """Whether to give up, since another quorum has the same replicas and one of them is certain.

        Clocks and counts differ a little between replicas. By this they end together, and none of them goes on alone
        because the others have ended before it was certain itself.
        """
        return any(hopeless) and names == self.names and self._number >= _EXPLAIN_AT
