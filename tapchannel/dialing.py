"""Reaching the address that a mailbox has published, and saying what trying again may mend."""

from __future__ import annotations

import socket

from .errors import AttachError
from .sockets import connect, other_user


class Again(Exception):
    """This attempt failed for a reason that time may mend; ``ours``: by our own deadline."""

    def __init__(self, reason: str, *, ours: bool = False) -> None:
        super().__init__(reason)
        self.ours = ours


def dial(address: str, limit: float) -> socket.socket:
    """Connect to a mailbox of this user.

    Raises:
        Again: nobody answers there now.
        AttachError: the address is impossible, or another user's.
    """
    try:
        link = connect(address, limit)
    except TimeoutError as error:
        raise Again(f"{address}: {error}", ours=True) from error
    except (ConnectionError, FileNotFoundError, BlockingIOError) as error:
        raise Again(f"{address}: {error}") from error
    except OSError as error:
        raise unusable(address, error) from error
    problem = other_user(link)
    if problem is None:
        return link
    link.close()
    raise AttachError(
        "mailbox belongs to another user",
        reason=problem,
        next_step="run both sides as one user, or use a store that others cannot write",
    )


def unusable(address: str, error: OSError) -> AttachError:
    """Build the error for an address that trying again would not mend."""
    return AttachError(
        "mailbox's address cannot be used",
        seen=address,
        reason=str(error),
        next_step="name a socket path that both sides may open",
    )
