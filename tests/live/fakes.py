"""The replica without torch, and questions about processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

LIGHTHOUSE_PAGE = """
Current quorum_id: 7 <br>
Next quorum status: New quorum not ready, only have 0 participants, need min_replicas 1
<h3>Previous Quorum</h3>
Previous quorum id: 7 <br>
Num participants: 2 <br>
Quorum age:
0.83071074s
<div class="member

">
  <b>r1:uuid1</b> <br/>
  Step: 40 <br/>
  Manager: http://127.0.0.1:1 <br/>
  TCPStore: 127.0.0.1:2 <br/>
</div>
<div class="member
recovering
">
  <b>r0:uuid0</b> <br/>
  Step: 0 <br/>
</div>
<h2>Heartbeats</h2>
<ul>
  <li class="heartbeat

  ">
    r1:uuid1: seen 0.027221429s ago
  </li>
  <li class="heartbeat

  ">
    r0:uuid0: seen 0.1s ago
  </li>
  <li class="heartbeat
    old
  ">
    r0:earlier: seen 830.9s ago
  </li>
</ul>
"""

FAKE = Path(__file__).parent / "fake_replica.py"


def alive(pid: int) -> bool:
    """Whether a process runs; the dead that nobody has waited for do not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):  # it is gone before the file is opened, or before it is read
        return False


def until(condition: Callable[[], object], *, seconds: float = 120.0) -> None:
    """Wait for something that must happen; how long it takes proves nothing."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen"
        time.sleep(0.02)


def processes_with(text: str) -> list[int]:
    """Processes whose environment or command line names something, this one left out."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                said = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            except OSError:
                continue
            if text.encode() in said and alive(int(entry.name)):
                found.append(int(entry.name))
    return found
