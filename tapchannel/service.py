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
from .errors import AttachError, TapChannelError
from .handshake import Desk, Handshake, Peer, Refused
from .sockets import listen, peer_uid

HANDSHAKE_LIMIT_S: Final = 10.0
MAX_HANDSHAKES: Final = 64
_REFUSALS_KEPT: Final = 16
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
        self._listener = listen(address)
        _native.close_in_child(self._listener.fileno())
        self._thread = threading.Thread(target=self._accept, name="tapchannel-service", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; attached lanes stay. Twice is fine.

        Blocks:     for milliseconds.
        """
        if os.getpid() != self._pid or self._listener.fileno() < 0:
            return
        _native.keep_in_child(self._listener.fileno())
        try:
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept; close alone would not
        except OSError:
            log.debug("listening socket was down already")
        self._thread.join(HANDSHAKE_LIMIT_S)
        self._listener.close()
        if not self.address.startswith("unix://@"):
            Path(self.address.removeprefix("unix://")).unlink(missing_ok=True)

    def _accept(self) -> None:
        while True:
            try:
                link, _ = self._listener.accept()
            except OSError:
                return  # closed
            if not self._room.acquire(blocking=False):
                link.close()  # the outbox tries again until its own deadline
                continue
            threading.Thread(
                target=self._serve, args=(link,), name="tapchannel-handshake", daemon=True
            ).start()

    def _serve(self, link: socket.socket) -> None:
        try:
            with link:
                link.settimeout(HANDSHAKE_LIMIT_S)
                _check_uid(link)
                Handshake(self._desk, link, time.monotonic() + HANDSHAKE_LIMIT_S).run()
        except (Refused, TapChannelError, OSError, ValueError) as error:
            log.warning("channel %r refused a peer: %s", self._name, error)
            self.refusals[:] = [*self.refusals[1 - _REFUSALS_KEPT :], str(error)]
        finally:
            self._room.release()


def _check_uid(link: socket.socket) -> None:
    """Refuse other users; whoever is root may look at this process's memory anyway."""
    uid = peer_uid(link)
    if uid not in (os.geteuid(), 0):
        raise AttachError(
            "peer belongs to another user", seen=f"uid {uid}", expected=f"uid {os.geteuid()}"
        )
