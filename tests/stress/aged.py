"""A lane's shared counters, set to just before their 32 bits wrap, past the protocol.

The 64-bit ones (a recorder's next number, stamps) do not wrap in any job's life; the fields of a
stamp reach their ends by way of the channel's own calls.
"""

from __future__ import annotations

import struct

from support.blocks import LaneWords
from tapchannel import Mailbox, _native

LINE = 64
SIDE_TAIL = 6 * LINE  # bell, text of 4 lines, beat: the end of either side's words
CONSUMER_HEAD = 7 * LINE
PRODUCER_HEAD = 11 * LINE
WRAP = 1 << 32
RINGS_LEFT = 40
EVENTS_LEFT = 3_000


class AgedLane(LaneWords):
    """One lane, while nobody is attached to it."""

    def __init__(self, mailbox: Mailbox, lane: int, depth: int, cells: int) -> None:
        super().__init__(mailbox, lane, depth, cells)
        layout = _native.layout()
        producer_bell = self._stamps - SIDE_TAIL
        consumer_bell = producer_bell - PRODUCER_HEAD - SIDE_TAIL
        if consumer_bell != layout["header_bytes"] + CONSUMER_HEAD:
            raise AssertionError("the control block's layout has changed: see control_block.hpp")
        self._bells = consumer_bell, producer_bell
        ring = self._announces + depth * cells * layout["announce_bytes"]
        ring_bytes = LINE + layout["ring_entries"] * layout["event_bytes"]
        self._rings = ring, ring + ring_bytes

    def age(self) -> None:
        """Let both bells and both recorders wrap soon."""
        for place in self._bells:
            struct.pack_into("<I", self._memory, place, WRAP - RINGS_LEFT)
        for place in self._rings:
            struct.pack_into("<Q", self._memory, place, WRAP - EVENTS_LEFT)

    def wrapped(self) -> list[bool]:
        """Tell for each bell and recorder whether it has gone past the wrap."""
        bells = [struct.unpack_from("<I", self._memory, place)[0] for place in self._bells]
        events = [struct.unpack_from("<Q", self._memory, place)[0] for place in self._rings]
        return [count < WRAP // 2 for count in bells] + [count > WRAP for count in events]
