"""The checkpoints of a fleet, for the loss of all its replicas at once; a single replica receives the state of a peer.

They are folders that `save_state` (`run/sharded_checkpoint.py`) wrote to a disk that all replicas see, or to a bucket.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ebbflow.core.storage import COMPLETE, Storage
from ebbflow.engines.replica_ranks import ReplicaRanks
from ebbflow.errors import CheckpointError, StorageUnreachable, UnreadableCheckpoints
from ebbflow.live.checkpoint_names import CheckpointName, list_checkpoints, outdated_checkpoints
from ebbflow.run.sharded_checkpoint import MakeTensor, load_state, save_state, whole_tensor
from ebbflow.torch_api import HostCopies

__all__ = ["Checkpoints"]


class Checkpoints:
    """The checkpoints in a folder or bucket, of which the newest are kept. All replicas of a fleet share the place.

    Training stops only while a state is copied into the memory of the host; a thread writes it. If a replica has
    several ranks, all of them make their checkpoints and call `newest` and `save` at the same point of the training.
    """

    def __init__(
        self,
        place: str | Path,
        *,
        keep: int = 3,
        on_event: Callable[[str, str], None],
        ranks: ReplicaRanks | None = None,
        pinned: bool = False,
    ) -> None:
        """`place`: a folder, or a URL such as s3://bucket/job. `keep`: how many are kept. `on_event(what, text)`:
        called for damaged checkpoints and failures, from any thread. `ranks`: those that have the state together.
        `pinned`: whether the state is copied into pinned memory, for one that is on a GPU; if no memory can be pinned,
        it is copied into any other.
        """
        self.storage = Storage(place)
        self.keep = keep
        self.on_event = on_event
        self.ranks = ranks or ReplicaRanks()
        # The threads that write have a group of their own: the ranks go on to talk about their steps meanwhile.
        self._group = self.ranks.another_group()
        self._writing: threading.Thread | None = None
        self._skipped = False
        """Whether a checkpoint was skipped since the one under way was begun."""
        self._pinned = pinned
        self._copies = HostCopies(pinned=pinned)

    def newest(
        self, *, beyond: int = -1, make: MakeTensor = whole_tensor
    ) -> tuple[CheckpointName, dict[str, Any]] | None:
        """Read the newest undamaged checkpoint beyond a step; damaged ones are reported and passed over.

        Raises UnreadableCheckpoints if there are some and none can be used: training would begin anew; and
        StorageUnreachable if the place does not answer. `make`: see `load_state`.
        """
        if self._group is not None:
            self.wait()  # for the thread that uses the group
        names = self._shared(lambda: list_checkpoints(self.storage)[0])
        for name in names:
            if name.step <= beyond:
                return None
            try:
                return name, load_state(self._place(name), make=make, group=self._group)
            except CheckpointError as error:
                self.on_event("checkpoint damaged", f"{error}; the one before it is used")
        if beyond <= 0:
            self._refuse_to_begin_anew(names)
        return None

    def _refuse_to_begin_anew(self, names: list[CheckpointName]) -> None:
        advice = "begin anew with `ebbflow launch --from-scratch`, which keeps the old files beside the new ones"
        if names:
            raise UnreadableCheckpoints(
                f"all {len(names)} checkpoints in {self.storage.location} are damaged; restore one of them, or {advice}"
            )
        if self._shared(lambda: any(name.endswith(".ckpt") for name in self.storage.names())):
            raise UnreadableCheckpoints(
                f"{self.storage.location} has checkpoints of an earlier version of ebbflow (*.ckpt), which this one "
                f"does not read; finish the job with that version, or {advice}"
            )

    def has(self, step: int, lineage: int) -> bool:
        """Whether a state is saved, by whomever; False if that cannot be seen. Any rank may ask by itself."""
        try:
            return any((name.step, name.lineage) == (step, lineage) for name in list_checkpoints(self.storage)[0])
        except StorageUnreachable:
            return False

    def save(self, state: Mapping[str, Any], *, step: int, lineage: int) -> None:
        """Copy a state, and write it in the background; all ranks do so, or none.

        If an earlier one is still being written, on any rank, this one is skipped.
        """
        said = self.ranks.gather((self._is_writing(), CheckpointName.new(step, lineage)))
        name = said[0][1]
        if any(writing for writing, _ in said):
            if not self._skipped:
                self.on_event("checkpoint skipped", f"that of step {step}: the one before it is still being written")
            self._skipped = True
            return
        self.wait()
        staged, problem = None, ""
        try:
            staged = self._copied(state)
        except (MemoryError, RuntimeError) as error:  # torch's allocator raises the latter
            problem = f"the state cannot be copied: {error}; training goes on"
        # A rank that wrote alone would wait for the others for ever.
        if problems := list(filter(None, self.ranks.gather(problem))):
            self.on_event("checkpoint failed", problems[0])
            return
        self._skipped = False
        self._writing = threading.Thread(target=self._write, args=(name, staged), name="ebbflow-checkpoint")
        self._writing.start()

    def _copied(self, state: Mapping[str, Any]) -> Any:
        """The state in the memory of the host."""
        try:
            return self._copies.copied(dict(state))
        except RuntimeError as error:
            if not self._pinned:
                raise
            self.on_event("memory is not pinned", f"checkpoints are copied into other memory: {error}")
        self._pinned, self._copies = False, HostCopies(pinned=False)
        if torch.cuda.is_available():  # it reports its last error once more, to whatever is launched next
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device="cuda")
        return self._copies.copied(dict(state))

    def _is_writing(self) -> bool:
        return self._writing is not None and self._writing.is_alive()

    def wait(self) -> None:
        """Wait until the checkpoint under way is written."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None

    def _write(self, name: CheckpointName, state: Mapping[str, Any]) -> None:
        try:
            save_state(self._place(name), state, group=self._group)
        except StorageUnreachable as error:
            self.on_event("checkpoint failed", f"{error}; training goes on, and the next one is tried")
            self._remove(name)
            return
        with contextlib.suppress(StorageUnreachable):  # the next one tries again
            for old in outdated_checkpoints(name, *list_checkpoints(self.storage), keep=self.keep):
                self._remove(old)

    def _remove(self, name: CheckpointName) -> None:
        if self.ranks.leads:
            # What is half removed must not look complete.
            with contextlib.suppress(StorageUnreachable, FileNotFoundError):
                self.storage.remove(str(name), COMPLETE)
            with contextlib.suppress(StorageUnreachable, FileNotFoundError):
                self.storage.remove(str(name))

    def _place(self, name: CheckpointName) -> str:
        return f"{self.storage.location.rstrip('/')}/{name}"

    def _shared(self, find: Callable[[], Any]) -> Any:
        """What rank 0 finds, or the error that it raises."""
        found, problem = None, ""
        if self.ranks.leads:
            try:
                found = find()
            except StorageUnreachable as error:
                problem = str(error)
        found, problem = self.ranks.share((found, problem))
        if problem:
            raise StorageUnreachable(problem)
        return found
