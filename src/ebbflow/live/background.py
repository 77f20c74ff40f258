"""Threads that stay, for calls that cannot be interrupted: starting one takes as long as a question to the lighthouse.

The threads of `concurrent.futures` stay, too, but a process waits for them before it ends, and a call may hang.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["BackgroundThreads"]


class BackgroundThreads:
    """Does work in threads that are used again. They do not keep the process from ending.

    Work begins at once: if all threads are busy, or hang, a further one is started. Nothing can be cancelled; whoever
    does not want a result any longer does not look at it. Between two pieces of work a thread keeps neither the last
    one nor its result alive.

    A thread that comes back from compiled code while the interpreter ends may abort the process, as torchft's does
    ("FATAL: exception not rethrown"): so `close` can wait for what is about to end.
    """

    def __init__(self, name: str) -> None:
        """`name`: of all these threads."""
        self._name = name
        self._changing = threading.Condition()
        self._idle: list[_Inbox] = []  # of the threads that have nothing to do
        self._busy = 0  # threads that have
        self._closed = False

    def begin(self, work: Callable[[], Any]) -> queue.SimpleQueue[Any]:
        """Begin some work; the queue will hold what it returned, or the Exception that it raised."""
        outcome: queue.SimpleQueue[Any] = queue.SimpleQueue()
        with self._changing:
            inbox = self._idle.pop() if self._idle else None
            self._busy += 1
        if inbox is None:
            inbox = queue.SimpleQueue()
            threading.Thread(target=self._serve, args=(inbox,), daemon=True, name=self._name).start()
        inbox.put((work, outcome))
        return outcome

    def close(self, *, patience_s: float = 0.0) -> None:
        """End the idle threads; the others end with what they do. So do those of work that is begun later.

        Waits for the work that is under way, for `patience_s` at most.
        """
        with self._changing:
            self._closed = True
            for inbox in self._idle:
                inbox.put(None)
            self._idle.clear()
            self._changing.wait_for(lambda: not self._busy, patience_s)

    def _serve(self, inbox: _Inbox) -> None:
        while self._do_next(inbox):
            pass

    def _do_next(self, inbox: _Inbox) -> bool:
        """Wait for work and do it; False if there will be none. What it refers to is forgotten at the end."""
        task = inbox.get()
        if task is None:
            return False
        work, outcome = task
        try:
            result = work()
        except Exception as error:
            self._becomes_idle(inbox)
            outcome.put(error)
        else:
            self._becomes_idle(inbox)  # before anybody knows of the result, and begins what follows from it
            outcome.put(result)
        return True

    def _becomes_idle(self, inbox: _Inbox) -> None:
        with self._changing:
            self._busy -= 1
            if self._closed:
                inbox.put(None)
                self._changing.notify_all()
            else:
                self._idle.append(inbox)


_Inbox = queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]] | None]
"""What a thread waits for: work, with the place for its outcome; None if it is to end."""
