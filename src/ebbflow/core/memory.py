"""The memory of a process that trains on a CPU."""

from __future__ import annotations

import ctypes

__all__ = ["keep_freed_memory"]

# Of glibc's malloc.h. The values have to fit into a C int.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_MOST = 2**31 - 1
_LARGE_BLOCK, _LARGE_BLOCK_ONCE = 2**30, 2**25  # the second is the most that older versions take


def keep_freed_memory() -> bool:
    """Have the C library keep what a step frees for the next one; False where it has no such setting (glibc has).

    By default large blocks go back to the system and come back empty, page by page: 50,000 page faults in a step of
    shakespeare-gpt with 128 sequences, a fifth of its time. Holds for the whole process and for good, so it is for
    processes that Ebbflow starts, not for those it is imported into. The peak of the memory stays what it is; it is
    given back when the process ends.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    blocks = mallopt(_MMAP_THRESHOLD, _LARGE_BLOCK) or mallopt(_MMAP_THRESHOLD, _LARGE_BLOCK_ONCE)
    return bool(mallopt(_TRIM_THRESHOLD, _MOST) and blocks)
