"""Whether a quorum must not compute, by what is known of the replicas that it lacks.

The lighthouse names the replicas that ask it and send heartbeats. A lighthouse that was just started or stood still, a
replica that hangs, and a link that is cut can all lead to a quorum beside others that train. One replica of every new
quorum therefore looks at the heartbeats of all replicas, and asks the living ones that the quorum lacks what they do.
If it objects, all of them ask the lighthouse again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from ebbflow.live.agreement import without_heartbeat
from ebbflow.live.membership_events import Handshake, HeartbeatsReceived, PublishedGroup, QuorumFormed
from ebbflow.live.protocol import HEARTBEAT_INTERVAL_S

__all__ = ["LighthouseWatch", "Objections"]

_MAX_OBJECTIONS = 5  # because of a replica that is late, or does not answer
_JUST_DIED_S = 2.0  # for which those who have not come as far do not believe that others are dead
_LOOK_AGAIN_S = 2 * HEARTBEAT_INTERVAL_S  # before it is believed that most of the others have died at once
_MAX_GAPS = 3  # between answers of the lighthouse about quorums that are taken for a standstill


class LighthouseWatch:
    """For how long the lighthouse has answered, by the times of its answers.

    A lighthouse that has just been started, or that stood still, takes living replicas for dead until it has heard
    their heartbeats. What it says proves something only when it has answered for a while.
    """

    def __init__(self, heartbeat_timeout_s: float) -> None:
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._reached_at = self._answers_since = self._answered_at = math.inf
        self._gaps = 0
        self._alive: frozenset[str] = frozenset()  # replicas that sent heartbeats at its last answer

    def reached(self, now: float) -> None:
        """This replica has registered, or a request has failed and is tried again."""
        self._reached_at, self._answers_since, self._answered_at = now, math.inf, math.inf

    def lost(self) -> None:
        """It did not say how old the heartbeats are."""
        self._reached_at = self._answers_since = self._answered_at = math.inf

    def answered(self, now: float, *, about_quorum: bool, ages: Mapping[str, float]) -> None:
        """It said how old the heartbeats are (`ages`); `about_quorum`: since it has formed a quorum."""
        if not self._alive <= ages.keys():  # it was restarted, so quickly that no request failed: it forgets nobody
            self.reached(now)
        self._alive = frozenset(name for name, age in ages.items() if age <= self._heartbeat_timeout_s)
        self._reached_at = min(self._reached_at, now)
        gap = now - self._answered_at > self._heartbeat_timeout_s
        # Where every quorum takes that long, as with very many replicas, no more gaps are believed in.
        self._gaps += gap and about_quorum
        if self._answers_since == math.inf or (gap and self._gaps <= _MAX_GAPS):
            self._answers_since = now
        self._answered_at = now

    def forget_gaps(self) -> None:
        """A step was committed."""
        self._gaps = 0

    def reached_s(self, now: float) -> float:
        """For how long it has been there, as far as is known; negative if it is not."""
        return now - self._reached_at

    def answers_s(self, now: float) -> float:
        """For how long it has said how old the heartbeats are, with no gap of more than the heartbeat timeout."""
        return now - self._answers_since


class Objections:
    """What one replica knows that speaks against a quorum."""

    def __init__(self, *, heartbeat_timeout_s: float, patience_s: float) -> None:
        """`patience_s`: how long a replica that trained with this one, sends heartbeats and does not answer is waited
        for; longer than a step, after which it would ask the lighthouse."""
        self.watch = LighthouseWatch(heartbeat_timeout_s)
        self.participants: tuple[str, ...] = ()
        """Of the last committed step."""
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._patience_s = patience_s
        self._number = 0  # of objections, since the last committed step
        self._since: float | None = None  # the first of them
        self._met = -1  # steps of the furthest established replica that this one has met since its last committed step
        self._names: tuple[str, ...] = ()  # of the quorum
        self._furthest = -1  # steps of the established replica of the quorum that has come furthest
        self._left_behind = False  # whether somebody is known to have come further than that one
        self._asks = False

    def consider(self, quorum: QuorumFormed) -> None:
        """Take note of the quorum that the lighthouse has formed."""
        self._names = quorum.replicas
        trained = [step for step, there in zip(quorum.steps, quorum.established, strict=True) if there]
        self._furthest = max(trained, default=-1)
        # The checkpoint of a newcomer may show that others have gone on without the established replicas that are here.
        self._left_behind = not trained or max(*quorum.steps, self._met) > self._furthest
        # If possible, one that knows the lighthouse for long.
        first = quorum.established.index(True) if trained else 0
        self._asks = quorum.rank == first or self.met_further

    @property
    def met_further(self) -> bool:
        """Whether this replica has met one that had come further than the established ones of the quorum."""
        return self._met > self._furthest

    @property
    def asks(self) -> bool:
        """Whether this replica asks the living ones that the quorum lacks what they do."""
        return self._asks

    @property
    def looks(self) -> bool:
        """Whether it has to know who sends heartbeats, to say whether it objects."""
        return self._asks or bool(self._missing and self._number < _MAX_OBJECTIONS)

    @property
    def _missing(self) -> set[str]:
        """Participants of the last committed step that the lighthouse left out of the quorum."""
        return set(self.participants).difference(self._names) if self.participants != self._names else set()

    def objects(self, answer: HeartbeatsReceived) -> bool:
        """Whether the quorum must not compute.

        It must not as long as others may commit steps meanwhile: those of a quorum group none of whose replicas is in
        this quorum. A replica that does not say in which group it is may be in such a group, and so may one of which
        the lighthouse has not heard yet, because it has only just been started. Nor must it if a living replica has
        come further: its steps would be given up.
        """
        if self._asks and (not answer.ages or self._proves_nothing_yet(answer)):
            return True
        if any(self._speaks_against(name, other, answer.now) for name, other in answer.groups.items()):
            return True
        # A lighthouse that stood still for a moment takes all replicas for dead and forms a quorum of whoever asks
        # first. A replica that hangs sends heartbeats, too, and the lighthouse rightly leaves it out after a while:
        # so the number of these objections is limited.
        missing = self._missing
        late = len(missing) - len(without_heartbeat(missing, answer.ages, self._heartbeat_timeout_s))
        return late > 0 and self._number < _MAX_OBJECTIONS

    def _proves_nothing_yet(self, answer: HeartbeatsReceived) -> bool:
        """Whether the lighthouse may take living replicas for dead, or not know of them."""
        now, timeout_s = answer.now, self._heartbeat_timeout_s
        if self.watch.reached_s(now) < timeout_s:
            return True
        if self._left_behind:
            ours = set(self._names)
            died = (age for name, age in answer.ages.items() if name not in ours)
            just_died = any(timeout_s < age < timeout_s + _JUST_DIED_S for age in died)
            return just_died or self.watch.answers_s(now) < timeout_s
        most_are_missing = self._missing and 2 * len(self._missing) >= len(self.participants)
        return bool(most_are_missing) and self.watch.answers_s(now) < _LOOK_AGAIN_S

    def _speaks_against(self, name: str, group: PublishedGroup | None, now: float) -> bool:
        """Whether a living replica that the quorum lacks does, by what it says of itself; None if nothing."""
        if group is None:
            return self._waits_for(name, now)
        trains_with_others = bool(group.names) and set(group.names).isdisjoint(self._names)
        return trains_with_others or (group.established and group.step > self._furthest)

    def _waits_for(self, name: str, now: float) -> bool:
        """Whether a replica is waited for that sends heartbeats and does not say what it does.

        One that trained with this group is with nobody else, since those others would say so: it hangs without letting
        its threads run, and is waited for no longer than one that is late, unless it is known that nobody here has come
        as far. But these others may have gone, and the link to it may be cut: then the lighthouse names it in a quorum
        when it asks for its next step.
        """
        waited = self._since is not None and now - self._since > self._patience_s and self._number >= _MAX_OBJECTIONS
        return name not in self.participants or not waited or self.met_further

    def objected(self, now: float) -> None:
        """A replica of the quorum has objected."""
        self._number += 1
        self._since = now if self._since is None else self._since

    def meet(self, handshakes: Iterable[Handshake]) -> None:
        """Take note of how far the replicas of a quorum have come."""
        self._furthest = max((one.state.step for one in handshakes if one.state.established), default=-1)
        self._met = max(self._met, self._furthest)

    def committed(self, participants: tuple[str, ...]) -> None:
        """A step was committed: what spoke against quorums before has come to an end."""
        self.participants = participants
        self._number, self._since, self._met = 0, None, -1
        self.watch.forget_gaps()
