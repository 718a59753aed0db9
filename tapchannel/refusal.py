"""Refusals of the attach handshake: what one side tells the other before it ends it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, cast

from . import errors
from .error_text import ErrorFields
from .errors import PlanMismatchError, ProtocolError, TapChannelError, TransportUnavailable
from .wire import Fields

MAX_TRANSPORTS: Final = 8
MAX_WORD: Final = 32
_LONGEST_REASON: Final = 512
_ROW_TEXTS: Final = ("expected", "claimed", "problem")
_ROWS_SENT: Final = 256


@dataclass(frozen=True, slots=True)
class Refusal:
    """Either side to the other: why there is no attach; ``again`` if trying later may help."""

    error: str
    what: str
    reason: str
    next_step: str
    again: bool
    rows: tuple[Mapping[str, object], ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict[str, str])

    def body(self) -> dict[str, object]:
        """Give the frame's body."""
        return {
            "error": self.error,
            "what": self.what[:512],
            "reason": self.reason[:2048],
            "next_step": self.next_step[:512],
            "again": self.again,
            "rows": [
                [row["rank"], *(str(row[name])[:256] for name in _ROW_TEXTS)]
                for row in self.rows[:_ROWS_SENT]
            ],
            "refused": refusal_pairs(self.refused),
        }

    @classmethod
    def parse(cls, fields: Fields) -> Refusal:
        """Check a peer's frame."""
        return cls(
            fields.text("error", 64),
            _line(fields.text("what", 512)),
            _line(fields.text("reason", 2048)),
            _line(fields.text("next_step", 512)),
            fields.flag("again"),
            tuple(_mismatch_row(item) for item in fields.items("rows", _ROWS_SENT)),
            refusal_reasons(fields),
        )

    def as_error(self, channel: str, rank: int) -> TapChannelError:
        """Give the error that the refused outbox raises."""
        if self.error == "PlanMismatchError":
            return PlanMismatchError(
                self.what,
                rows=self.rows,  # pyright: ignore[reportArgumentType]
                channel=channel,
                next_step=self.next_step,
            )
        where: ErrorFields = {"channel": channel, "rank": rank}
        if self.reason:
            where["cause"] = self.reason
        if self.next_step:
            where["next_step"] = self.next_step
        if self.error == "TransportUnavailable":
            return TransportUnavailable(self.what, refused=self.refused, **where)
        kinds = {"UsageError": errors.UsageError, "ChannelClosed": errors.ChannelClosed}
        return kinds.get(self.error, errors.AttachError)(self.what, **where)


def refusal_pairs(refused: Mapping[str, str]) -> list[list[str]]:
    """Write why each transport was refused, for a frame's body."""
    return [[name, reason[:_LONGEST_REASON]] for name, reason in refused.items()]


def refusal_reasons(fields: Fields) -> dict[str, str]:
    """Read why each transport was refused, as the peer's own words."""
    reasons: dict[str, str] = {}
    for item in fields.items("refused", MAX_TRANSPORTS):
        parts = cast("Sequence[object]", item) if isinstance(item, list) else ()
        if len(parts) != 2:
            raise ProtocolError("peer refuses a transport without saying which and why")
        reasons[short_text(parts[0], MAX_WORD)] = _line(short_text(parts[1], _LONGEST_REASON))
    return reasons


def short_text(item: object, longest: int) -> str:
    """Take an item of a list that must be a text of at most ``longest`` characters."""
    if not isinstance(item, str) or len(item) > longest:
        raise ProtocolError("handshake frame lists something that is no name")
    return item


def _line(text: str) -> str:
    """Give a peer's words on one line: they end up in an error and in a log."""
    return " ".join(text.split())


def _mismatch_row(item: object) -> Mapping[str, object]:
    parts = cast("Sequence[object]", item) if isinstance(item, list) else ()
    if len(parts) != 4 or not (parts[0] is None or isinstance(parts[0], int)):
        raise ProtocolError("refusal holds a row that is none")
    texts = [short_text(part, 4096) for part in parts[1:]]
    return {"rank": parts[0], "expected": texts[0], "claimed": texts[1], "problem": texts[2]}
