"""Peers made by hand: they speak the attach handshake frame by frame, rightly or not."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from support.blocks import ATTACHED, write_lane_state
from support.small_channel import LIMIT, NAME, PLAN
from tapchannel import _native
from tapchannel.descriptor import Challenge, Hello, Offer
from tapchannel.sockets import connect
from tapchannel.wire import (
    CHALLENGE,
    HELLO,
    LIVE,
    OFFER,
    READY,
    REFUSAL,
    Fields,
    receive_frame,
    send_frame,
)

NONCE = bytes(range(32))


def dial(address: str) -> socket.socket:
    """Connect to a mailbox service."""
    return connect(address, LIMIT)


def hello(**changes: object) -> dict[str, object]:
    """Give the body of a right hello, but for the changes."""
    made = Hello(NAME, 7, os.getpid(), "n1", NONCE, PLAN.to_json(), None, ("shm",), "", None)
    return {**made.body(), **changes}


def receive(link: socket.socket, *kinds: int) -> tuple[Fields, list[int]]:
    """Receive one frame of these kinds within the tests' limit."""
    return receive_frame(link, time.monotonic() + LIMIT, kinds)


def ended(link: socket.socket) -> bool:
    """Read to the end of the connection; tell whether the other side ended it in time."""
    link.settimeout(LIMIT)
    try:
        while link.recv(65536):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


class HandmadeOutbox:
    """The outbox's side of the handshake, one step at a time."""

    def __init__(self, address: str) -> None:
        self.link = dial(address)
        fields, _ = receive(self.link, CHALLENGE)
        self.challenge = Challenge.parse(fields)

    def ask(self, **changes: object) -> Offer:
        """Send a hello; give the offer, and close the descriptors that came with it but for two.

        The control block's and the arena's stay open in `block_fd` and `arena_fd`.
        """
        send_frame(self.link, HELLO, hello(**changes))
        fields, fds = receive(self.link, OFFER)
        self.block_fd, self.arena_fd = fds
        return Offer.parse(fields)

    def write_probe(self, offer: Offer) -> None:
        """Write the self-test into the offered memory."""
        arena = _native.Arena.adopt_host(os.dup(self.arena_fd), offer.arena_bytes)
        arena.write_probe(offer.probe_offset, offer.probe)

    def go_live(self, **changes: object) -> Offer:
        """Attach in the right order; only the hello may differ."""
        offer = self.ask(**changes)
        self.write_probe(offer)
        self.ready()
        receive(self.link, LIVE)
        write_lane_state(self.block_fd, ATTACHED)
        return offer

    def ready(self) -> None:
        """Say that the self-test is written."""
        send_frame(self.link, READY, {})

    def close(self) -> None:
        """End the connection and let go of the descriptors, saying nothing."""
        self.link.close()
        for fd in (getattr(self, "block_fd", -1), getattr(self, "arena_fd", -1)):
            with contextlib.suppress(OSError):
                os.close(fd)

    def __enter__(self) -> HandmadeOutbox:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@contextmanager
def impostor(folder: Path, act: Callable[[socket.socket], None]) -> Iterator[str]:
    """Listen where a mailbox would, and let ``act`` handle each connection; give the address."""
    path = folder / "impostor.sock"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(8)

    def serve() -> None:
        while True:
            try:
                link, _ = listener.accept()
            except OSError:
                return  # the test is over
            with link, contextlib.suppress(ConnectionError, TimeoutError):
                link.settimeout(LIMIT)
                act(link)

    thread = threading.Thread(target=serve, name="impostor", daemon=True)
    thread.start()
    try:
        yield f"unix://{path}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(LIMIT)
        listener.close()
        assert not thread.is_alive()


def challenge(**changes: object) -> dict[str, object]:
    """Give the body of a right challenge without a secret, but for the changes."""
    return {**Challenge(bytes(16), NONCE, NAME, False).body(), **changes}


def take_hello(link: socket.socket, **changes: object) -> None:
    """Be a mailbox up to the hello."""
    send_frame(link, CHALLENGE, challenge(**changes))
    receive(link, HELLO)


def offering(
    changes: Mapping[str, object], fds: Callable[[], Sequence[int]]
) -> Callable[[socket.socket], None]:
    """Be a mailbox that offers rank 7's lane with these changes and descriptors, and waits."""

    def act(link: socket.socket) -> None:
        take_hello(link)
        sent = fds()
        try:
            send_frame(link, OFFER, {**offer_body(), **changes}, sent)
        finally:
            for fd in sent:
                os.close(fd)
        with contextlib.suppress(ConnectionError, TimeoutError):
            receive(link, READY, REFUSAL)
            send_frame(link, LIVE, {})
            ended(link)

    return act


def offer_body() -> dict[str, object]:
    """Give the body of the offer that a mailbox of the tests' plan would make to rank 7."""
    lane = next(
        lane for lane in PLAN.lanes({3: ["embedding", "low"], 7: ["high"]}) if lane.rank == 7
    )
    size = PLAN.arena_bytes(2) + 2 * 4096
    offer = Offer(
        transport="shm",
        refused={},
        lane=lane.index,
        shards=tuple(cell.shard for cell in lane.cells),
        depth=2,
        slot_bytes=PLAN.slot_bytes,
        arena_bytes=size,
        memory="host",
        device_uuid=None,
        handle=None,
        drop_newest=False,
        pid=os.getpid(),
        host="n0",
        probe_offset=size - 4096,
        probe=bytes(64),
        proof=None,
    )
    return offer.body()


def block_fd(
    *, lane: int = 1, depth: int = 2, cells: int = 1, mailbox_id: bytes = bytes(16)
) -> int:
    """Give a descriptor of a control block, by default the one that rank 7 is due."""
    return _native.ControlBlock.create("handmade", lane, depth, cells, mailbox_id).export_fd()


def arena_fd(size: int = PLAN.arena_bytes(2) + 2 * 4096) -> int:
    """Give a descriptor of host memory, by default of the offered size."""
    return _native.Arena.create_host("handmade", size).export_fd()
