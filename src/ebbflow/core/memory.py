"""The memory of the host: how much is free, and a setting of the allocator for processes that train on a CPU."""

from __future__ import annotations

import ctypes
from pathlib import Path

__all__ = ["free_memory", "keep_freed_memory"]

# Constants of glibc's malloc.h. The values have to fit into a C int.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_MOST = 2**31 - 1
_LARGE_BLOCK, _LARGE_BLOCK_OLD = 2**30, 2**25  # the second is the largest value that older versions accept


def keep_freed_memory() -> bool:
    """Let the C library keep freed memory for the next step; False if it has no such setting (glibc has).

    By default large blocks are returned to the system and fetched again page by page: 50,000 page faults per step of
    shakespeare-gpt with 128 sequences, a fifth of its time. The setting holds for the whole process until it ends, so
    that it is for processes that Ebbflow starts, not for those that import it. The peak of the memory does not change.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    blocks = mallopt(_MMAP_THRESHOLD, _LARGE_BLOCK) or mallopt(_MMAP_THRESHOLD, _LARGE_BLOCK_OLD)
    return bool(mallopt(_TRIM_THRESHOLD, _MOST) and blocks)


def free_memory(root: Path = Path("/")) -> int | None:
    """Bytes that this process can still get without swapping, within the limit of its container; None if unknown."""
    found = []
    try:
        lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    except (OSError, ValueError, IndexError):
        return None
    group = root / "sys/fs/cgroup"
    try:
        limit, used = ((group / name).read_text(encoding="ascii").strip() for name in ("memory.max", "memory.current"))
        found += [max(0, int(limit) - int(used))] if limit != "max" else []
    except (OSError, ValueError):
        pass  # no container, or one whose limits are not written there
    return min(found, default=None)
