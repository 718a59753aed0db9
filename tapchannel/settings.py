"""Small settings that both roles check alike."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, cast

from .errors import ConfigError
from .layout import checked_name
from .plan import Lane

if TYPE_CHECKING:
    import torch

_LONGEST_WAIT_S: Final = 86400.0
# Silence, not slowness: as long as bytes move, a peer lives.
PEER_TIMEOUT_S: Final = 7.0
CREDIT_WAIT_S: Final = 1.0  # of a push from a GPU: see Outbox.push
_LEAST_PEER_TIMEOUT_S: Final = 2.0
_MIN_SECRET: Final = 8


def checked_choice(name: str, value: str, choices: Sequence[str]) -> str:
    """Give back one of the choices.

    Raises:
        ConfigError: it is none of them.
    """
    if value not in choices:
        raise ConfigError(
            f"{name} is unknown", seen=repr(value), expected=" or ".join(map(repr, choices))
        )
    return value


def checked_seconds(name: str, value: object) -> float:
    """Give back a wait's limit: finite, since every wait ends (I3).

    Raises:
        ConfigError: it is negative, endless, or no number.
    """
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not 0 <= value <= _LONGEST_WAIT_S
    ):
        raise ConfigError(
            f"{name} is no finite number of seconds",
            seen=repr(value),
            expected=f"0 to {_LONGEST_WAIT_S:.0f} s",
        )
    return float(value)


def checked_peer_timeout(value: object) -> float:
    """Give back the seconds without an answer after which a peer of another host is lost.

    Raises:
        ConfigError: it is no number, less than a heartbeat takes, or endless.
    """
    seconds = checked_seconds("peer_timeout", value)
    if seconds < _LEAST_PEER_TIMEOUT_S:
        raise ConfigError(
            "peer_timeout is shorter than two heartbeats",
            seen=repr(value),
            expected=f"at least {_LEAST_PEER_TIMEOUT_S:.0f} s",
        )
    return seconds


def secret_bytes(secret: object) -> bytes | None:
    """Give the job secret, from the argument or ``TAPCHANNEL_SECRET``.

    Raises:
        ConfigError: it is no text or bytes, or too short to be a secret.
    """
    given = secret if secret is not None else os.environ.get("TAPCHANNEL_SECRET")
    if given is None:
        return None
    # The environment hands over bytes that are no text as surrogates: os.fsencode gives them back.
    made = os.fsencode(given) if isinstance(given, str) else given
    if not isinstance(made, bytes):
        raise ConfigError(
            "job secret is neither text nor bytes",
            seen=type(secret).__name__,
            expected="str or bytes",
        )
    if len(made) < _MIN_SECRET:
        raise ConfigError("job secret is too short", expected=f"at least {_MIN_SECRET} bytes")
    return made


def checked_claims(taps: object) -> tuple[str, ...] | None:
    """Give back the taps that an outbox believes to be its own.

    Raises:
        ConfigError: they are no sequence of names.
    """
    if taps is None:
        return None
    # One bare name is a sequence of names to Python: of its letters.
    if isinstance(taps, str) or not isinstance(taps, Iterable):
        raise ConfigError("taps is no sequence of names", seen=reprlib.repr(taps))
    return tuple(checked_name("name in taps: tap", name) for name in cast("Iterable[object]", taps))


def check_mode() -> bool:
    """Tell whether ``TAPCHANNEL_CHECK=1`` asks for checksums and for filling released slots."""
    return os.environ.get("TAPCHANNEL_CHECK", "") not in ("", "0")


def reading_stream(
    stream: torch.cuda.Stream | None, ordinal: int | None
) -> tuple[torch.cuda.Stream | None, int]:
    """Give the stream a lease is read on, the current one by default, and the driver's handle."""
    if ordinal is None:
        return None, 0
    import torch

    chosen = stream or torch.cuda.current_stream(ordinal)
    return chosen, chosen.cuda_stream


def cell_geometry(lane: Lane, max_rows: int) -> list[tuple[int, ...]]:
    """Give a lane's cells as the native core takes them."""
    return [
        (
            cell.byte_offset,
            cell.row_bytes,
            cell.pitch,
            cell.row_limit,
            max_rows,
            cell.tap.dtype.code,
            cell.tap.dtype.poison_byte,
            cell.tap.index,
            int(cell.shard.columns[0] == 0),
            cell.width,
        )
        for cell in lane.cells
    ]
