"""How each rank fared while a session was opened, told through the process group's store.

Not by a collective: on a GPU its kernel runs until the last rank has come. The mailbox's service,
which registers memory for a rank that attaches meanwhile, waits for that kernel, and that rank for
the service: Megatron's start-up stood still in two runs of four.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

from ..errors import AttachError, AttachTimeout

_PAUSE_S: Final = 0.01
_LONGEST: Final = 4000  # characters of an error that the others are told
WELL: Final = "well"


class Settlement:
    """One opening's ranks. All settle the same phases in the same order."""

    def __init__(
        self, store: Any, token: str, rank: int, ranks: Sequence[int], limit: float
    ) -> None:
        self._store, self._rank, self._ranks = store, rank, ranks
        self._prefix, self._limit, self._phase = f"tapchannel/settle/{token}", limit, 0

    def settle(self, problem: Exception | None) -> None:
        """Tell the others how this phase went here; raise if it went wrong anywhere.

        Blocks:     until every rank has told, at most ``limit`` seconds.

        Raises:
            Exception: the problem given.
            AttachError: another rank has one; its text is the reason.
            AttachTimeout: a rank has told nothing.
        """
        self._phase += 1
        said = WELL if problem is None else f"{type(problem).__name__}: {problem}"[:_LONGEST]
        self._store.set(self._key(self._rank), said)
        if problem is not None:
            raise problem
        heard = self._hear()
        bad = [f"rank {rank}: {text}" for rank, text in heard.items() if text != WELL]
        if bad:
            raise AttachError("another rank could not open its part", reason="; ".join(bad))

    def _hear(self) -> dict[int, str]:
        until = time.monotonic() + self._limit
        missing = [rank for rank in self._ranks if rank != self._rank]
        heard: dict[int, str] = {}
        while missing:
            # check() first: get() would wait, and hold the store's connection.
            told = [rank for rank in missing if self._store.check([self._key(rank)])]
            for rank in told:
                heard[rank] = bytes(self._store.get(self._key(rank))).decode("utf-8", "replace")
                if heard[rank] != WELL:
                    return heard
            missing = [rank for rank in missing if rank not in told]
            if missing and time.monotonic() > until:
                raise AttachTimeout(
                    "a rank did not open its part of the session",
                    seen=f"nothing from rank {', '.join(map(str, missing))}",
                    limit=self._limit,
                    next_step="look for that rank's own error; call attach on all ranks",
                )
            if missing:
                time.sleep(_PAUSE_S)
        return heard

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/{self._phase}/{rank}"
