"""PNG files that Pillow does not write: numbers of any bit depth and colour type."""

from __future__ import annotations

import struct
import zlib
from typing import Any

from numpy.typing import NDArray

GREY, COLOURS, GREY_WITH_ALPHA = 0, 2, 4


def png(numbers: NDArray[Any], *, bits: int, colours: int = GREY) -> bytes:
    """Return a file with the numbers of shape `(height, width)` or `(height, width, channels)` as they are."""
    height, width = numbers.shape[:2]
    rows = b""
    for row in numbers.reshape(height, -1):
        digits = "".join(f"{number:0{bits}b}" for number in row)
        digits += "0" * (-len(digits) % 8)
        rows += b"\0" + int(digits, 2).to_bytes(len(digits) // 8, "big")
    header = struct.pack(">IIBBBBB", width, height, bits, colours, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in chunks
    )
