"""Choice of transport, lane by lane: the outbox asks, the mailbox offers the first that it serves.

Every transport that was passed over is kept with the reason, on both sides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ..errors import ConfigError, TransportUnavailable
from ..memory import Device
from .base import Transport
from .cuda_ipc import CudaIpc
from .shm import Shm

_FASTEST_FIRST: Final[tuple[Transport, ...]] = (CudaIpc(), Shm())
TRANSPORTS: Final[Mapping[str, Transport]] = {
    transport.name: transport for transport in _FASTEST_FIRST
}
TRANSPORT_CHOICES: Final = ("auto", *TRANSPORTS)


@dataclass(frozen=True, slots=True)
class Served:
    """The transports that a mailbox serves, fastest first, and why it serves no other."""

    transports: tuple[Transport, ...]
    refused: Mapping[str, str]

    def pick(self, asked: Sequence[str]) -> tuple[Transport | None, dict[str, str]]:
        """Give the first of the asked that is served, and the reason for each before it."""
        mine = {transport.name: transport for transport in self.transports}
        refused: dict[str, str] = {}
        for name in asked:
            if name in mine:
                return mine[name], refused
            refused[name] = self.refused.get(name, "the mailbox does not know this transport")
        return None, refused


@dataclass(slots=True)
class Asked:
    """The transports that are still to be tried, fastest first, and why the others are not."""

    names: tuple[str, ...]
    refused: dict[str, str]

    @classmethod
    def of(cls, wanted: str) -> Asked:
        """Begin with all that an outbox of this process may use.

        Raises:
            ConfigError: there is no transport of that name.
            TransportUnavailable: none can be used from here; the text gives each reason.
        """
        names, refused = _usable(wanted)
        if not names:
            raise TransportUnavailable("no transport can be used from here", refused=refused)
        return cls(names, refused)

    def without(self, refused: Mapping[str, str]) -> bool:
        """Strike what was refused; tell whether anything new was, and something is left to try."""
        left = tuple(name for name in self.names if name not in refused)
        progress = len(left) < len(self.names)
        self.names, self.refused = left, {**self.refused, **refused}
        return progress and bool(left)


def serve(device: Device, wanted: str) -> Served:
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


def _usable(wanted: str) -> tuple[tuple[str, ...], dict[str, str]]:
    _check_name(wanted)
    names = tuple(TRANSPORTS) if wanted == "auto" else (wanted,)
    absent = {name: TRANSPORTS[name].absence() for name in names}
    refused = {name: reason for name, reason in absent.items() if reason is not None}
    return tuple(name for name in names if name not in refused), refused
