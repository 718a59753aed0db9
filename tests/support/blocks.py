"""A lane's control block, read and written past the protocol, as a hostile peer would."""

from __future__ import annotations

import mmap
import os
import struct

from tapchannel import Mailbox, _native

_ANNOUNCE = struct.Struct("<QQQII8QII")


class LaneWords:
    """The stamps and announces of one lane; close it when done."""

    def __init__(self, mailbox: Mailbox, lane: int, depth: int, cells: int) -> None:
        fd = mailbox._core.block_fd(lane)
        try:
            self._memory = mmap.mmap(fd, os.fstat(fd).st_size)
        finally:
            os.close(fd)
        layout = _native.layout()
        self._stamps = layout["stamps_3_5"]  # the same for every depth and number of cells
        self._announces = self._stamps + -(-depth * cells * 8 // 64) * 64
        self._announce_bytes = layout["announce_bytes"]
        self._cells = cells

    def stamp(self, slot: int, cell: int = 0) -> int:
        """Return a cell's stamp."""
        return struct.unpack_from("<Q", self._memory, self._stamp_at(slot, cell))[0]

    def write_stamp(self, slot: int, word: int, cell: int = 0) -> None:
        """Overwrite a cell's stamp."""
        struct.pack_into("<Q", self._memory, self._stamp_at(slot, cell), word)

    def announce(self, slot: int, cell: int = 0) -> dict[str, int]:
        """Return a cell's announce: key, rows, row_begin, dtype, ndim, flags, checksum."""
        fields = _ANNOUNCE.unpack_from(self._memory, self._announce_at(slot, cell))
        names = ("key", "rows", "row_begin", "dtype", "ndim")
        facts = dict(zip(names, fields, strict=False))
        return facts | {"flags": fields[13], "checksum": fields[14]}

    def write_announce(self, slot: int, cell: int = 0, **changes: int) -> None:
        """Overwrite fields of a cell's announce, the key last."""
        facts = self.announce(slot, cell) | changes
        shape = _ANNOUNCE.unpack_from(self._memory, self._announce_at(slot, cell))[5:13]
        head = (facts["key"], facts["rows"], facts["row_begin"], facts["dtype"], facts["ndim"])
        tail = (facts["flags"], facts["checksum"])
        at = self._announce_at(slot, cell)
        packed = _ANNOUNCE.pack(*head, *shape, *tail)
        self._memory[at + 8 : at + len(packed)] = packed[8:]
        self._memory[at : at + 8] = packed[:8]

    def close(self) -> None:
        """Unmap the block."""
        self._memory.close()

    def _stamp_at(self, slot: int, cell: int) -> int:
        return self._stamps + (slot * self._cells + cell) * 8

    def _announce_at(self, slot: int, cell: int) -> int:
        return self._announces + (slot * self._cells + cell) * self._announce_bytes


ATTACHED = 1
_STATE_BEFORE_STAMPS = 512  # bytes: the producer's words behind its state


def write_lane_state(block_fd: int, state: int) -> None:
    """Have a lane's producer say what becomes of it, as its first and its last word."""
    with mmap.mmap(block_fd, 0) as memory:
        at = _native.layout()["stamps_3_5"] - _STATE_BEFORE_STAMPS
        struct.pack_into("<Q", memory, at, state)
