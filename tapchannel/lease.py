"""Lease: the right to read one slot in place, until the last view on it is gone (steps 7 to 9)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Final, cast

import torch
import torch.utils.dlpack

from .arrivals import Shares, TapInfo, arrived, rows_of_tap, verify
from .errors import ChecksumError, TapChannelError, UsageError
from .keys import Key
from .plan import Group, Tap
from .tensors import TORCH_DTYPES

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from . import _native
    from .error_text import ErrorFields


def references(views: Mapping[str, torch.Tensor], name: str) -> int:
    """Count who refers to a view, in Python and in autograd graphs."""
    view = views[name]
    graphs = int(view._use_count())  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownArgumentType]
    return graphs + sys.getrefcount(view)


# What that comes to for a view that only its dict refers to: it differs between releases of torch.
_UNHELD: Final = references({"view": torch.empty(2)[:1]}, "view")


@dataclass(slots=True)  # not frozen: that takes three times as long to make, once a microbatch
class Granted:
    """What the core gave: the lease's number and key, its slot as a DLPack capsule, its checks."""

    core: _native.Mailbox
    number: int
    capsule: object
    key: Key
    rows: int | None
    raise_for: Callable[[_native.Verdict, str], TapChannelError]
    timeout: float
    stream: torch.cuda.Stream | None
    channel: str


class Lease(Mapping[str, torch.Tensor]):
    """Views on one slot, by the name of a group or a tap.

    ``taps["features"]`` is the group's ``[rows, sum of widths]``, in place; ``taps["layer1"]`` is
    that tap's columns of it. Use it as a context manager; leaving drops the lease's own references.

    Ordering:   kernels on the lease's stream that are queued after `Mailbox.recv` see the bytes
                pushed for exactly this key. For reads on another stream: `record_stream`.
    Ownership:  the slot goes back when the last tensor, saved variable or closure on it is gone,
                behind what is queued on the lease's streams then (I9). Do not write to a view.
    On failure: a wait that failed after `recv` returned is raised by every later use, and by
                leaving the ``with`` block; the stream then saw the poison pattern (I4).
    """

    def __init__(self, granted: Granted, shares: Shares) -> None:
        self._granted = granted
        self._shares = shares
        self._views: dict[str, torch.Tensor] = {}
        self._info: dict[str, TapInfo] = {}
        flat = torch.utils.dlpack.from_dlpack(granted.capsule)  # pyright: ignore[reportUnknownMemberType]
        self._flat: torch.Tensor | None = flat
        self._stream = granted.stream
        self._settled = False

    @property
    def key(self) -> Key:
        """The key that this lease reads."""
        return self._granted.key

    @property
    def info(self) -> Mapping[str, TapInfo]:
        """What came for each tap.

        Blocks:     only after ``recv(rows=…)``: until every producer has announced, or the
                    deadline.
        """
        self._usable("info")
        if not self._info:
            self._settle()
            core, key = self._granted.core, self._granted.key
            self._info = {
                tap.name: arrived(core, self._shares, key, tap) for tap in self._shares.plan.taps
            }
        return self._info

    @property
    def missing(self) -> frozenset[str]:
        """The taps that were dropped (``when_full="drop_newest"``); they read as poison."""
        return frozenset(name for name, info in self.info.items() if info.dropped)

    def __getitem__(self, name: str) -> torch.Tensor:
        self._usable(f"view {name!r}")
        view = self._views.get(name)
        if view is None:
            view = self._views[name] = self._make_view(name)
        return view

    def __iter__(self) -> Iterator[str]:
        return iter(self._shares.names)

    def __len__(self) -> int:
        return len(self._shares.names)

    def __contains__(self, name: object) -> bool:
        return name in self._shares.names

    def __enter__(self) -> Lease:
        self._usable("enter")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._flat is None:
            return
        verdict = self._granted.core.check_lease(self._granted.number)
        self._let_go()
        if verdict is not None and error is None:
            raise self._granted.raise_for(verdict, "lease")

    def __repr__(self) -> str:
        state = "released" if self._flat is None else ", ".join(self)
        return f"<Lease of {self._granted.key}: {state}>"

    def release(self) -> None:
        """Give the slot back now.

        Blocks:     never; on a GPU the credit follows when the queued reads have been performed.
        On failure: nothing has changed.

        Raises:
            UsageError: views on the slot are alive, or the lease was released already.
        """
        self._usable("release")
        live = self._live_views()
        if live:
            raise self._misuse(
                "release: tensor views on the slot are still alive",
                seen=f"{live} live view{'s' if live > 1 else ''}",
                expected="0",
                next_step="drop them first, take clone() instead, or leave the with block: "
                "the slot goes back when the last one is gone",
            )
        self._let_go()

    def clone(self) -> dict[str, torch.Tensor]:
        """Give copies of every group and tap, and the slot back at once.

        Ordering:   the copies are made on the lease's stream, before the slot goes back. Taps are
                    views on the copy of their group.
        """
        self._usable("clone")
        with torch.cuda.stream(self._stream):
            groups = {group.name: self[group.name].clone() for group in self._shares.plan.groups}
        copies: dict[str, torch.Tensor] = {}
        for group in self._shares.plan.groups:
            for tap in group.taps:
                copies[tap.name] = groups[group.name][:, tap.column : tap.column + tap.width]
        copies.update(groups)
        self._let_go()
        return copies

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Say that a view is read on another stream, too: the slot goes back behind it as well."""
        self._usable("record_stream")
        self._granted.core.record_stream(self._granted.number, stream.cuda_stream)

    def verify(self) -> None:
        """Compare every cell's bytes with the checksum that its producer announced.

        Blocks:     until the key has landed, and for a copy to the host. For
                    ``TAPCHANNEL_CHECK=1``.

        Raises:
            ChecksumError: the bytes in the slot are not the bytes that were pushed.
        """
        self._usable("verify")
        self._settle()
        for tap in self._shares.plan.taps:
            whole = self._window(
                self._shares.plan.group(tap.group), tap, self._shares.plan.max_rows
            )
            try:
                verify(self._granted.core, self._shares, self._granted.key, tap, whole)
            except ChecksumError as error:
                error.channel = self._granted.channel
                raise

    # ---- how views are made

    def _make_view(self, name: str) -> torch.Tensor:
        plan = self._shares.plan
        group = next((group for group in plan.groups if group.name == name), None)
        if group is None:
            tap = plan.tap(name)
            return self._window(plan.group(tap.group), tap, self._rows(tap))
        rows = {tap.name: self._rows(tap) for tap in group.taps}
        if len(set(rows.values())) > 1:
            raise self._misuse(
                f"taps of group {name!r} came with different rows: no side-by-side view of them",
                seen=", ".join(f"{tap}: {count}" for tap, count in rows.items()),
                next_step="read the taps one by one, or push equal rows",
            )
        return self._window(group, None, next(iter(rows.values())))

    def _window(self, group: Group, tap: Tap | None, rows: int) -> torch.Tensor:
        """Give the group's rows, or a tap's columns of them, as a view on the slot."""
        flat = cast("torch.Tensor", self._flat)
        octets = flat[group.offset : group.offset + rows * group.row_bytes]
        whole = octets.view(TORCH_DTYPES[group.dtype.name]).view(rows, group.width)
        return whole if tap is None else whole[:, tap.column : tap.column + tap.width]

    def _rows(self, tap: Tap) -> int:
        granted = self._granted
        if granted.rows is not None:
            return granted.rows
        self._settle()
        return rows_of_tap(granted.core, self._shares, granted.key, tap)

    def _settle(self) -> None:
        """Wait until every producer has announced; only a recv with its rows named has not."""
        if self._settled:
            return
        verdict = self._granted.core.settle(self._granted.number, self._granted.timeout)
        if verdict is not None:
            raise self._granted.raise_for(verdict, "lease")
        self._settled = True

    # ---- the end of the lease

    def _usable(self, doing: str) -> None:
        if self._flat is None:
            raise self._misuse(
                f"{doing}: the lease was released",
                next_step="use its views inside the with block, or keep clone()",
            )
        verdict = self._granted.core.check_lease(self._granted.number)
        if verdict is not None:
            raise self._granted.raise_for(verdict, doing)

    def _misuse(self, what: str, **fields: Unpack[ErrorFields]) -> UsageError:
        error = UsageError(what, **fields)
        error.channel, error.key = self._granted.channel, self._granted.key
        return error

    def _live_views(self) -> int:
        """Count what keeps the slot: other tensors on it, and own views still referenced."""
        flat = cast("torch.Tensor", self._flat)
        storage = flat.untyped_storage()
        holders = int(torch._C._storage_Use_Count(storage._cdata))  # pyright: ignore[reportPrivateUsage, reportUnknownArgumentType, reportAttributeAccessIssue, reportUnknownMemberType]
        # A change of dtype makes a tensor in between, which the view keeps as its base.
        bases = [view._base for view in self._views.values()]
        between = len({id(base) for base in bases if base is not None and base is not flat})
        others = holders - 2 - len(self._views) - between  # 2: this wrapper and the flat view
        del bases
        return others + sum(1 for name in self._views if references(self._views, name) > _UNHELD)

    def _let_go(self) -> None:
        self._views = {}
        self._flat = None
