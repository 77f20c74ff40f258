"""Threads that stay: they are used again, a hanging one is in nobody's way, and the process can end."""

from __future__ import annotations

import gc
import queue
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ebbflow.live.background import BackgroundThreads
from live.fakes import until

PATIENCE_S = 60.0
"""Far more than anything here takes; a test that fails does not hang."""


@pytest.fixture
def threads() -> Iterator[BackgroundThreads]:
    background = BackgroundThreads("background-of-a-test")
    yield background
    background.close()


class Hanging:
    """Work that hangs until it is released."""

    def __init__(self) -> None:
        self.began, self.released = threading.Event(), threading.Event()

    def __call__(self) -> threading.Thread:
        self.began.set()
        assert self.released.wait(PATIENCE_S)
        return threading.current_thread()


def done(outcome: queue.SimpleQueue[Any]) -> Any:
    return outcome.get(timeout=PATIENCE_S)


def ended(thread: threading.Thread) -> bool:
    thread.join(PATIENCE_S)
    return not thread.is_alive()


def test_a_free_thread_is_used_again(threads: BackgroundThreads) -> None:
    used = {done(threads.begin(threading.current_thread)) for _ in range(100)}
    assert len(used) == 1
    assert used.isdisjoint({threading.current_thread()})


def test_while_one_thread_hangs_another_one_works_and_both_are_used_afterwards(threads: BackgroundThreads) -> None:
    first = done(threads.begin(threading.current_thread))
    hanging = Hanging()
    abandoned = threads.begin(hanging)
    assert hanging.began.wait(PATIENCE_S)
    second = done(threads.begin(threading.current_thread))
    assert second is not first
    assert done(threads.begin(threading.current_thread)) is second
    hanging.released.set()
    assert done(abandoned) is first
    pair = [Hanging(), Hanging()]
    outcomes = [threads.begin(work) for work in pair]
    for work in pair:
        work.released.set()
    assert {done(outcome) for outcome in outcomes} == {first, second}


def test_an_exception_is_the_outcome_and_the_thread_goes_on(threads: BackgroundThreads) -> None:
    thread = done(threads.begin(threading.current_thread))
    error = ValueError("said by the work")

    def fail() -> None:
        raise error

    assert done(threads.begin(fail)) is error
    assert done(threads.begin(threading.current_thread)) is thread


class Result:
    """Something that can be referred to weakly."""


def returns_it(it: Result) -> Result:
    return it


def raises_with_it(it: Result) -> None:
    raise ValueError(it)


@pytest.mark.parametrize("work", [returns_it, raises_with_it])
def test_an_idle_thread_keeps_neither_the_work_nor_its_result_alive(
    threads: BackgroundThreads, work: Callable[[Result], Any]
) -> None:
    result = Result()
    seen = weakref.ref(result)
    outcome = threads.begin(lambda result=result: work(result))
    del result
    taken = done(outcome)
    assert seen() is not None
    del taken

    def forgotten() -> bool:  # by the thread, which gave the outcome before that
        gc.collect()  # an exception and the frames that it went through refer to each other
        return seen() is None

    until(forgotten)


def test_closing_ends_idle_threads_at_once_and_busy_ones_with_their_work() -> None:
    threads, hanging = BackgroundThreads("background-of-a-test"), Hanging()
    outcome = threads.begin(hanging)
    assert hanging.began.wait(PATIENCE_S)
    idle = done(threads.begin(threading.current_thread))
    assert idle.is_alive()
    threads.close()
    assert ended(idle)
    hanging.released.set()
    busy = done(outcome)
    assert busy is not idle and ended(busy)
    later = done(threads.begin(threading.current_thread))
    assert ended(later)
    threads.close()


def test_closing_waits_for_work_that_is_about_to_end_and_not_for_what_hangs(threads: BackgroundThreads) -> None:
    hanging, ends = Hanging(), Hanging()
    outcomes = [threads.begin(work) for work in (hanging, ends)]
    assert hanging.began.wait(PATIENCE_S) and ends.began.wait(PATIENCE_S)
    threads.close(patience_s=0.1)
    ends.released.set()
    hanging.released.set()
    threads.close(patience_s=PATIENCE_S)
    assert threads._busy == 0 and len({done(outcome) for outcome in outcomes}) == 2


@pytest.mark.process
def test_neither_a_hanging_nor_an_idle_thread_keeps_the_process_from_ending() -> None:
    script = """if True:
        import threading
        from ebbflow.live.background import BackgroundThreads
        threads, began = BackgroundThreads("background"), threading.Event()
        threads.begin(lambda: (began.set(), threading.Event().wait()))
        assert began.wait()
        assert threads.begin(lambda: 7).get() == 7
        assert sum(thread.name == "background" for thread in threading.enumerate()) == 2
        print("the main thread has ended")
    """
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "the main thread has ended\n", "")
