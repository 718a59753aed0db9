"""Choice of transport: the first that serves the mailbox's device, with each refusal's reason."""

from __future__ import annotations

from typing import Final

from ..errors import ConfigError, TransportUnavailable
from ..memory import Device
from .base import Choice, Transport
from .cuda_ipc import CudaIpc
from .shm import Shm

_FASTEST_FIRST: Final[tuple[Transport, ...]] = (CudaIpc(), Shm())
TRANSPORT_CHOICES: Final = ("auto", *(transport.name for transport in _FASTEST_FIRST))


def choose(device: Device, wanted: str) -> Choice:
    """Choose the transport for a mailbox on ``device``; ``wanted`` names one or is ``"auto"``.

    Raises:
        ConfigError: there is no transport of that name.
        TransportUnavailable: none serves, or not the one wanted; the text gives each reason.
    """
    if wanted not in TRANSPORT_CHOICES:
        raise ConfigError("transport is unknown", seen=repr(wanted), expected=TRANSPORT_CHOICES)
    refused: dict[str, str] = {}
    for transport in _FASTEST_FIRST:
        if wanted not in ("auto", transport.name):
            continue
        reason = transport.refusal(device)
        if reason is None:
            return Choice(transport, refused)
        refused[transport.name] = reason
    raise TransportUnavailable(f"no transport serves a mailbox on {device}", refused=refused)


def transport_of(memory: str) -> Transport:
    """Give the transport that an offered kind of memory is reached by."""
    return _FASTEST_FIRST[1] if memory == "host" else _FASTEST_FIRST[0]
