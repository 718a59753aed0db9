"""Every error of tapchannel, in one tree, by who must act.

::

    TapChannelError
    ├─ ConfigError(ValueError)          caller: fix the settings
    ├─ UsageError(RuntimeError)         caller: fix the order of calls
    ├─ PlanMismatchError                both sides: agree on one tap plan
    ├─ AttachError                      operator: the attach was refused, or cannot work here
    ├─ TransportUnavailable             operator: no transport, or not the one asked for, works here
    ├─ DeviceError                      operator: the CUDA driver refused a call
    ├─ PeerLostError                    operator: a peer died; restart it, then reset
    ├─ PassAborted                      trainer: somebody ended the pass; open the next one
    ├─ TapTimeout(TimeoutError)         trainer: a rank is late or stuck
    │  ├─ StampTimeout                  the consumer waited for a producer
    │  ├─ CreditTimeout                 a producer waited for the consumer
    │  └─ AttachTimeout                 one side waited for the other to attach
    ├─ ProtocolError                    nobody's settings: report it as a bug
    │  ├─ StaleStampError               an older stamp came back into an open lease's cell
    │  ├─ OverrunError                  a slot was written without credit
    │  ├─ EpochMismatchError            a word of another life of the mailbox
    │  └─ ChecksumError                 the bytes read are not the bytes pushed
    ├─ ChannelClosed                    normal end: nothing more will come
    └─ WouldBlock                       not yet: only from the ``try_`` calls

An error is built from facts, never from a finished sentence: ``what`` failed, then typed keyword
fields, all optional and all kept as attributes. ``str()`` puts them in one fixed order: what
failed, where, seen against expected, time waited, last progress, likely cause, next step. Every
error survives pickling, so a child process's error reaches its parent whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, cast

from .error_text import ErrorFields, aligned, present, sentence

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .keys import Key


class PlanMismatchRow(TypedDict):
    """One line of a `PlanMismatchError`: what a rank should have said, and what it said.

    ``rank`` is ``None`` where no rank said anything: a part that nobody pushes.
    """

    rank: int | None
    expected: str
    claimed: str
    problem: str


class TapChannelError(Exception):
    """Base of every error of tapchannel: ``what`` failed, and the facts as attributes."""

    channel: str | None = None
    lane: int | None = None
    rank: int | None = None
    host: str | None = None
    pid: int | None = None
    stage: int | None = None
    key: Key | None = None
    tap: str | None = None
    slot: int | None = None
    seen: object = None
    expected: object = None
    waited: float | None = None
    limit: float | None = None
    last_progress: str | None = None
    cause: str | None = None
    next_step: str | None = None
    detail: str | None = None

    def __init__(self, what: str, **fields: Unpack[ErrorFields]) -> None:
        unknown = fields.keys() - ErrorFields.__annotations__.keys()
        if unknown:
            raise TypeError(f"{type(self).__name__} has no field {', '.join(sorted(unknown))}")
        super().__init__(what)
        self.what = what
        self.__dict__.update(fields)

    def __str__(self) -> str:
        fields = {name: getattr(self, name) for name in ErrorFields.__annotations__}
        text = sentence(self.what, cast("ErrorFields", fields), self._own_parts())
        return text + self._table()

    def __reduce__(self) -> tuple[Any, ...]:
        # Rebuilt without __init__, so that a subclass may give it any signature.
        return _rebuild, (type(self), self.args, self.__dict__.copy())

    def _own_parts(self) -> list[str]:
        """Sentences about the fields that only this class has."""
        return []

    def _table(self) -> str:
        """Lines to follow the sentence, each begun by a line feed."""
        return ""


class ConfigError(TapChannelError, ValueError):
    """A setting is impossible, or two settings contradict each other."""


class UsageError(TapChannelError, RuntimeError):
    """A call came at a wrong time, from a wrong place, or twice."""


class PlanMismatchError(TapChannelError):
    """Ranks disagree on the tap plan, or the plan and its sources do not fit together."""

    rows: tuple[PlanMismatchRow, ...]

    def __init__(
        self, what: str, *, rows: Sequence[PlanMismatchRow] = (), **fields: Unpack[ErrorFields]
    ) -> None:
        super().__init__(what, **fields)
        self.rows = tuple(rows)

    def _table(self) -> str:
        if not self.rows:
            return ""
        lines = [("rank", "expected", "claimed", "problem")]
        lines += [
            (
                "-" if row["rank"] is None else str(row["rank"]),
                row["expected"],
                row["claimed"],
                row["problem"],
            )
            for row in self.rows
        ]
        return "".join(f"\n  {line}" for line in aligned(lines))


class AttachError(TapChannelError):
    """An attach was refused by the other side, or is impossible from here."""

    reason: str | None

    def __init__(
        self, what: str, *, reason: str | None = None, **fields: Unpack[ErrorFields]
    ) -> None:
        super().__init__(what, **fields)
        self.reason = reason

    def _own_parts(self) -> list[str]:
        return present(("reason", self.reason))


class TransportUnavailable(TapChannelError):
    """No transport, or not the one asked for, can be used; ``refused`` says why, one by one."""

    refused: dict[str, str]

    def __init__(
        self,
        what: str,
        *,
        refused: Mapping[str, str] | None = None,
        **fields: Unpack[ErrorFields],
    ) -> None:
        super().__init__(what, **fields)
        self.refused = dict(refused or {})

    def _own_parts(self) -> list[str]:
        return [f"{transport} refused: {reason}" for transport, reason in self.refused.items()]


class DeviceError(TapChannelError):
    """The CUDA driver refused a call: its code, the code's name and what that means."""

    call: str | None
    code: int | None
    name: str | None
    meaning: str | None

    def __init__(
        self,
        what: str,
        *,
        call: str | None = None,
        code: int | None = None,
        name: str | None = None,
        meaning: str | None = None,
        **fields: Unpack[ErrorFields],
    ) -> None:
        super().__init__(what, **fields)
        self.call = call
        self.code = code
        self.name = name
        self.meaning = meaning

    def _own_parts(self) -> list[str]:
        if self.call is None and self.code is None:
            return present(("meaning", self.meaning))
        verdict = f"{self.call or 'the driver'} returned {self.name or 'an error'}"
        if self.code is not None:
            verdict += f" (code {self.code})"
        return [f"{verdict}: {self.meaning}" if self.meaning else verdict]


class PeerLostError(TapChannelError):
    """A peer died, or its socket ended, while the channel was in use."""


class PassAborted(TapChannelError):
    """The pass was ended by ``abort``: ``who`` ended it and their ``reason``."""

    who: str | None
    reason: str | None

    def __init__(
        self,
        what: str,
        *,
        who: str | None = None,
        reason: str | None = None,
        **fields: Unpack[ErrorFields],
    ) -> None:
        super().__init__(what, **fields)
        self.who = who
        self.reason = reason

    def _own_parts(self) -> list[str]:
        return present(("aborted by", self.who), ("reason", self.reason), joint=" ")


class TapTimeout(TapChannelError, TimeoutError):
    """A wait reached its deadline; the three subclasses say which wait."""


class StampTimeout(TapTimeout):
    """The consumer waited for a stamp that did not land (step 7)."""


class CreditTimeout(TapTimeout):
    """A producer waited for credit that did not come (steps 1 and 3)."""


class AttachTimeout(TapTimeout):
    """One side waited for the other to attach."""


class ProtocolError(TapChannelError):
    """The protocol was broken, by a bug or by a peer that does not follow it."""


class StaleStampError(ProtocolError):
    """An older stamp stands in a cell that is being read: something was written late."""


class OverrunError(ProtocolError):
    """A slot was written without the credit for it."""


class EpochMismatchError(ProtocolError):
    """A word or a peer belongs to another life of the mailbox."""


class ChecksumError(ProtocolError):
    """The bytes in the slot are not the bytes that were pushed."""


class ChannelClosed(TapChannelError):
    """The channel was closed, by either side; nothing more will come."""


class WouldBlock(TapChannelError):
    """What a ``try_`` call asked for is not there yet."""


def _rebuild(
    kind: type[TapChannelError], args: tuple[object, ...], state: dict[str, object]
) -> TapChannelError:
    error = kind.__new__(kind, *args)
    error.args = args  # OSError.__new__, under TimeoutError, leaves them to an __init__
    error.__dict__.update(state)
    return error
