"""The mailbox service: a Unix socket on which outboxes attach.

::

    mailbox                                   outbox
       │ ── challenge: id, nonce ───────────────▶ │   after the peer's uid was checked
       │ ◀── hello: rank, plan, proof ─────────── │
       │ ── offer: cells, memory; descriptors ──▶ │   only to a proven peer whose plan agrees
       │ ◀── ready: self-test written ─────────── │
       │ ── live ───────────────────────────────▶ │   after the self-test was read back

The socket stays open: its end is the first sign of the peer's death, on both sides. Nothing is
unpickled, no length is believed, each handshake has a deadline and their number is bounded.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from pathlib import Path
from typing import Final

from . import _native
from .assembly import Assembled, Wanted
from .error_text import printable
from .errors import TapChannelError
from .handshake import Desk, Handshake, Peer, Refused
from .refusal import Refusal
from .sockets import file_id, listen, native_address, other_user
from .wire import REFUSAL, send_frame

HANDSHAKE_LIMIT_S: Final = 10.0
MAX_HANDSHAKES: Final = 64
_REFUSALS_KEPT: Final = 16
_BREATH_S: Final = 0.05
log = logging.getLogger("tapchannel.service")


class MailboxService:
    """Accept outboxes for one mailbox, each handshake on a thread of its own."""

    def __init__(
        self,
        made: Assembled,
        wanted: Wanted,
        drop_newest: bool,
        secret: bytes | None,
        address: str,
    ) -> None:
        self.address = address
        self.peers: dict[int, Peer] = {}
        self.refusals: list[str] = []
        self._name = wanted.name
        self._pid = os.getpid()
        locks = [threading.Lock() for _ in wanted.lanes]
        self._desk = Desk(made, wanted, drop_newest, secret, self.peers, locks)
        self._room = threading.BoundedSemaphore(MAX_HANDSHAKES)
        self._closed = threading.Event()
        self._listener = listen(address)
        self._file = file_id(address)
        _native.close_in_child(self._listener.fileno())
        self._thread = threading.Thread(target=self._accept, name="tapchannel-service", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; attached lanes stay. Twice is fine.

        Blocks:     for milliseconds.
        """
        if os.getpid() != self._pid or self._listener.fileno() < 0:
            return
        self._closed.set()
        _native.keep_in_child(self._listener.fileno())
        try:
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept; close alone would not
        except OSError:
            log.debug("listening socket was down already")
        if threading.current_thread() is not self._thread:  # a collector may run us anywhere
            self._thread.join(HANDSHAKE_LIMIT_S)
        self._listener.close()
        # A successor may have taken the path over already: only our own file is ours to remove.
        if self._file is not None and file_id(self.address) == self._file:
            Path(native_address(self.address)).unlink(missing_ok=True)

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                link, _ = self._listener.accept()
            except OSError as error:
                if not self._closed.is_set():  # out of descriptors, say: others still need us
                    self._note(f"accept failed: {error}")
                    self._closed.wait(_BREATH_S)
                continue
            if not self._room.acquire(blocking=False):
                link.close()  # the outbox tries again until its own deadline
                continue
            try:
                threading.Thread(
                    target=self._serve, args=(link,), name="tapchannel-handshake", daemon=True
                ).start()
            except RuntimeError as error:  # no thread to be had
                self._room.release()
                link.close()
                self._note(f"no thread for a handshake: {error}")

    def _serve(self, link: socket.socket) -> None:
        try:
            with link:
                link.settimeout(HANDSHAKE_LIMIT_S)
                _check_uid(link)
                Handshake(self._desk, link, time.monotonic() + HANDSHAKE_LIMIT_S).run()
        except (Refused, TapChannelError, OSError, ValueError) as error:
            self._note(str(error))
        finally:
            self._room.release()

    def _note(self, text: str) -> None:
        line = printable(text).replace("\n", "\\n")
        log.warning("channel %r refused a peer: %s", self._name, line)
        self.refusals[:] = [*self.refusals[1 - _REFUSALS_KEPT :], line]


def _check_uid(link: socket.socket) -> None:
    """Refuse other users, and tell them: nothing else of ours is shown to them."""
    problem = other_user(link)
    if problem is None:
        return
    what = "mailbox belongs to another user"
    refusal = Refusal("AttachError", what, problem, "run both sides as one user", False)
    send_frame(link, REFUSAL, refusal.body())
    raise Refused(refusal)
