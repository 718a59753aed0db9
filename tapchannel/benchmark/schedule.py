"""1F1B: the order of a stage's forwards and backwards, and the tokens between neighbours.

A token stands for the activation or gradient that a real pipeline would send; it costs a write and
a read of a pipe.
"""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Final

_LIMIT_S: Final = 60.0


def order(ahead: int, microbatches: int) -> Iterator[tuple[bool, int]]:
    """Give (is a forward, microbatch) of the stage that has ``ahead`` stages behind it."""
    warm = min(ahead, microbatches)
    for message in range(warm):
        yield True, message
    for message in range(warm, microbatches):
        yield True, message
        yield False, message - warm
    for message in range(microbatches - warm, microbatches):
        yield False, message


def tell(neighbour: Connection | None) -> None:
    """Pass a token on, if there is a neighbour."""
    if neighbour is not None:
        neighbour.send_bytes(b"t")


def token(neighbour: Connection | None) -> None:
    """Wait for a token, if there is a neighbour.

    Raises:
        TimeoutError: none came in a minute.
    """
    if neighbour is None:
        return
    if not neighbour.poll(_LIMIT_S):
        raise TimeoutError(f"no token from the neighbour stage in {_LIMIT_S:.0f} s")
    neighbour.recv_bytes()
