"""Choice of transport, lane by lane: the outbox asks, the mailbox offers the first that it serves.

Every transport that was passed over is kept with the reason, on both sides.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ..errors import ConfigError, TransportUnavailable
from ..memory import Device
from .base import Transport
from .cuda_ipc import CudaIpc
from .host_staged import HostStaged
from .shm import Shm
from .ucx import Ucx

_FASTEST_FIRST: Final[tuple[Transport, ...]] = (CudaIpc(), Shm(), HostStaged(), Ucx())
TRANSPORTS: Final[Mapping[str, Transport]] = {
    transport.name: transport for transport in _FASTEST_FIRST
}
TRANSPORT_CHOICES: Final = ("auto", *TRANSPORTS)


ANOTHER_HOST: Final = "the link is TCP, and memory is shared on one host only"


@dataclass(frozen=True, slots=True)
class Served:
    """The transports that a mailbox serves, fastest first, and why it serves no other."""

    transports: tuple[Transport, ...]
    refused: Mapping[str, str]

    def pick(self, asked: Sequence[str], one_host: bool) -> tuple[Transport | None, dict[str, str]]:
        """Give the first of the asked that is served, and the reason for each before it."""
        mine = {transport.name: transport for transport in self.transports}
        refused: dict[str, str] = {}
        for name in asked:
            if name in mine and (one_host or not mine[name].one_host):
                return mine[name], refused
            if name in mine:
                refused[name] = ANOTHER_HOST
                continue
            refused[name] = self.refused.get(name, "the mailbox does not know this transport")
        return None, refused


class Asked:
    """The transports that an outbox may still ask for, and why it asks for no other.

    A transport between hosts is asked for where those of one host cannot be had: what it needs is
    looked for then only.

    Raises:
        ConfigError: there is no transport of that name.
    """

    def __init__(self, wanted: str) -> None:
        _check_name(wanted)
        self._wanted = tuple(TRANSPORTS) if wanted == "auto" else (wanted,)
        self.refused: dict[str, str] = {}
        self.failed: dict[str, str] = {}  # of those: what both sides have, and did not work

    def look(self, one_host: bool) -> float:
        """Look ahead for what `names` needs to know; give the seconds that it took.

        A library on a slow file system, or a busy host, is looked at for longer than a handshake
        may last.
        """
        began = time.monotonic()
        for name in self._wanted:
            if not TRANSPORTS[name].one_host and (not one_host or len(self._wanted) == 1):
                self._may_ask(name, near=False, one_host=one_host)
        return time.monotonic() - began

    def names(self, one_host: bool) -> tuple[str, ...]:
        """Give what to ask for over a link of one host, or of two.

        Raises:
            TransportUnavailable: nothing is left; the text gives each reason.
        """
        for near in (True, False):
            left = [name for name in self._wanted if self._may_ask(name, near, one_host)]
            if left:
                return tuple(left)
        raise TransportUnavailable("no transport reaches the mailbox", refused=self.refused)

    def without(self, refused: Mapping[str, str]) -> bool:
        """Strike what was refused; tell whether anything new was."""
        news = {name: reason for name, reason in refused.items() if name not in self.refused}
        self.refused |= news
        self.failed |= news
        return any(name in self._wanted for name in news)

    def _may_ask(self, name: str, near: bool, one_host: bool) -> bool:
        transport = TRANSPORTS[name]
        if name in self.refused or transport.one_host is not near:
            return False
        reason = ANOTHER_HOST if near and not one_host else transport.absence()
        if reason is not None:
            self.refused[name] = reason
        return reason is None


def serve(device: Device, wanted: str, listens: bool) -> Served:
    """Say what a mailbox on ``device`` serves; ``wanted`` names one transport or is ``"auto"``.

    Raises:
        ConfigError: there is no transport of that name.
        TransportUnavailable: none serves, or not the one wanted; the text gives each reason.
    """
    _check_name(wanted)
    served: list[Transport] = []
    refused: dict[str, str] = {}
    for name, transport in TRANSPORTS.items():
        if wanted not in ("auto", name):
            refused[name] = f"the mailbox was made with transport={wanted!r}"
            continue
        if wanted == "auto" and not transport.one_host and not listens:
            refused[name] = "the mailbox listens on this host only: give it listen='tcp://…'"
            continue
        reason = transport.refusal(device)
        if reason is None:
            served.append(transport)
        else:
            refused[name] = reason
    if not served:
        only = refused if wanted == "auto" else {wanted: refused[wanted]}
        raise TransportUnavailable(f"no transport serves a mailbox on {device}", refused=only)
    return Served(tuple(served), refused)


def faster(refused: Mapping[str, str], name: str) -> dict[str, str]:
    """Keep the refusals of those transports that stand before ``name``."""
    order = list(TRANSPORTS)
    before = order[: order.index(name)]
    return {other: refused[other] for other in before if other in refused}


def _check_name(wanted: str) -> None:
    if wanted not in TRANSPORT_CHOICES:
        raise ConfigError("transport is unknown", seen=repr(wanted), expected=TRANSPORT_CHOICES)
