"""The mailbox service: the sockets on which outboxes attach, of this host and of the network.

::

    mailbox                                   outbox
       │ ── challenge: id, nonce ───────────────▶ │   a Unix socket: after the uid was checked
       │ ◀── hello: rank, plan, proof ─────────── │
       │ ── offer: cells, memory; descriptors ──▶ │   only to a proven peer whose plan agrees
       │ ◀── ready: self-test written ─────────── │
       │ ── live ───────────────────────────────▶ │   after the self-test was read back

Over the network the kernel vouches for no user: the proof of the job secret decides alone.
The socket stays open: its end is the first sign of the peer's death, on both sides. Nothing is
unpickled, no length is believed, each handshake has a deadline and their number is bounded.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
from collections import deque
from typing import Final

from .assembly import Assembled, Wanted
from .error_text import printable
from .errors import TapChannelError
from .handshake import Desk, Handshake, Peer, Refused
from .listening import Listener, Places, open_all
from .refusal import Refusal
from .sockets import other_user, tune
from .wire import REFUSAL, send_frame

HANDSHAKE_LIMIT_S: Final = 10.0
MAX_HANDSHAKES: Final = 64
_REFUSALS_KEPT: Final = 16
_LINES_A_SECOND: Final = 8
_BREATH_S: Final = 0.05
log = logging.getLogger("tapchannel.service")


class RateLimit:
    """Lets so many things by in any second, and counts the others."""

    def __init__(self, a_second: int) -> None:
        self._lock = threading.Lock()
        self._recent: deque[float] = deque([-math.inf] * a_second, a_second)
        self._held_back = 0

    def due(self) -> int | None:
        """Give how many were held back since the last that was let by; None: this one is, too."""
        with self._lock:
            if time.monotonic() - self._recent[0] < 1.0:
                self._held_back += 1
                return None
            self._recent.append(time.monotonic())
            held_back, self._held_back = self._held_back, 0
            return held_back


class MailboxService:
    """Accept outboxes for one mailbox, each handshake on a thread of its own."""

    def __init__(
        self,
        made: Assembled,
        wanted: Wanted,
        drop_newest: bool,
        secret: bytes | None,
        places: Places,
    ) -> None:
        self.peers: dict[int, Peer] = {}
        self.refusals: list[str] = []
        self._told = RateLimit(_LINES_A_SECOND)
        self._name = wanted.name
        self._pid = os.getpid()
        locks = [threading.Lock() for _ in wanted.lanes]
        self._desk = Desk(made, wanted, drop_newest, secret, self.peers, locks)
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []
        self._listeners = open_all(places)
        self.addresses = tuple(one for listener in self._listeners for one in listener.addresses)
        try:
            for listener in self._listeners:
                self._start(listener)
        except RuntimeError:  # no thread to be had
            self.close()
            raise

    def close(self) -> None:
        """Stop listening; attached lanes stay. Twice is fine.

        Blocks:     for milliseconds.
        """
        if os.getpid() != self._pid or self._closed.is_set():
            return
        self._closed.set()
        for listener in self._listeners:
            listener.stop()
        for thread in self._threads:
            if threading.current_thread() is not thread:  # a collector may run us anywhere
                thread.join(HANDSHAKE_LIMIT_S)
        for listener in self._listeners:
            listener.close()

    def _start(self, listener: Listener) -> None:
        # Room of its own for each: a crowd on the network keeps no outbox of this host out.
        room = threading.BoundedSemaphore(MAX_HANDSHAKES)
        thread = threading.Thread(
            target=self._accept, args=(listener, room), name="tapchannel-service", daemon=True
        )
        thread.start()
        self._threads.append(thread)

    def _accept(self, listener: Listener, room: threading.BoundedSemaphore) -> None:
        while not self._closed.is_set():
            try:
                link, _ = listener.link.accept()
            except OSError as error:
                if not self._closed.is_set():  # out of descriptors, say: others still need us
                    self._note(f"accept failed: {error}")
                    self._closed.wait(_BREATH_S)
                continue
            if not room.acquire(blocking=False):
                link.close()  # the outbox tries again until its own deadline
                continue
            try:
                threading.Thread(
                    target=self._serve, args=(link, room), name="tapchannel-handshake", daemon=True
                ).start()
            except RuntimeError as error:  # no thread to be had
                room.release()
                link.close()
                self._note(f"no thread for a handshake: {error}")

    def _serve(self, link: socket.socket, room: threading.BoundedSemaphore) -> None:
        try:
            with link:
                link.settimeout(HANDSHAKE_LIMIT_S)
                if link.family == socket.AF_UNIX:
                    _check_uid(link)
                else:
                    tune(link)
                Handshake(self._desk, link, time.monotonic() + HANDSHAKE_LIMIT_S).run()
        except (Refused, TapChannelError, OSError, ValueError) as error:
            self._note(str(error))
        finally:
            room.release()

    def _note(self, text: str) -> None:
        line = printable(text).replace("\n", "\\n")
        self.refusals[:] = [*self.refusals[1 - _REFUSALS_KEPT :], line]
        untold = self._told.due()
        if untold is None:  # whoever knocks again and again shall not fill a disk
            return
        more = f" ({untold} more refused since the last line)" if untold else ""
        log.warning("channel %r refused a peer: %s%s", self._name, line, more)


def _check_uid(link: socket.socket) -> None:
    """Refuse other users, and tell them: nothing else of ours is shown to them."""
    problem = other_user(link)
    if problem is None:
        return
    what = "mailbox belongs to another user"
    refusal = Refusal("AttachError", what, problem, "run both sides as one user", False)
    send_frame(link, REFUSAL, refusal.body())
    raise Refused(refusal)
