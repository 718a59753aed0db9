"""How a session comes to be: all ranks agree, then all open their part, or none does."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias, cast

import torch
import torch.distributed as dist

from ..errors import ConfigError
from ..mailbox import Mailbox
from ..outbox import Outbox
from .agreement import Report, gather
from .session import Ends, Microbatches, Session
from .settling import Settlement
from .wiring import Settings, TapShape, Wiring, report_of, wire

_SLACK_S: Final = 10.0
_Settle: TypeAlias = Callable[[Exception | None], None]


def open_session(
    settings: Settings,
    produces: Mapping[str, TapShape],
    *,
    pp_group: dist.ProcessGroup,
    tp_group: dist.ProcessGroup | None = None,
    consumer: int = -1,
    device: torch.device | str,
    depth: int | None = None,
    needs: int | None = None,
    microbatches: Microbatches = None,
    refusals: Sequence[str] = (),
    store: object = None,
    secret: str | bytes | None = None,
    listen: str | None = None,
) -> Session:
    """Agree with the pipeline's other ranks, and open what this rank needs.

    Collective over ``pp_group``, and over ``tp_group`` where there is one. ``produces`` are the
    taps that this rank makes; ``consumer`` is the draft stage's place in ``pp_group``. ``depth``
    is the slots of a mailbox; by default the most that a rank's schedule ``needs`` (None: not
    known). The store defaults to the default process group's own.

    Blocks:     until all ranks are here and attached, to the groups' and the session's deadlines.
    On failure: every rank raises, and nothing stays open on any.

    Raises:
        ConfigError: settings differ, a tap is made nowhere or twice, or a rank was refused.
        TapChannelError: a mailbox or an outbox could not be opened.
    """
    rank = dist.get_rank()
    target = dist.get_global_rank(pp_group, consumer % dist.get_world_size(pp_group))
    facts = {"rank": rank, "consumer": target, "depth": depth, "needs": needs}
    mine = {**report_of(settings, produces, facts, refusals), "token": secrets.token_hex(8)}
    columns = _gather(mine, pp_group, tp_group)
    column = 0 if tp_group is None else dist.get_rank(tp_group)
    wiring = wire(settings, columns, column, rank)
    where: dict[str, Any] = {
        "device": str(device),
        "store": default_store() if store is None else store,
        "secret": secret,
        "timeout": settings.timeout,
        "transport": settings.transport,
    }
    settlement = _settlement(columns, rank, settings.timeout)
    ends = _Opening(settings, wiring, rank, where, listen).open(settlement.settle)
    return Session(settings, wiring, ends, microbatches)


def _gather(
    mine: Report, pp_group: dist.ProcessGroup, tp_group: dist.ProcessGroup | None
) -> list[list[Report]]:
    """Give the reports of the pipelines that the tensor-parallel group joins."""
    joined = gather({"column": gather(mine, pp_group)}, tp_group)
    return [cast("list[Report]", report["column"]) for report in joined]


def _settlement(columns: Sequence[Sequence[Report]], rank: int, timeout: float) -> Settlement:
    reports = [report for pipeline in columns for report in pipeline]
    ranks = [cast("int", report["rank"]) for report in reports]
    # Each rank made a token; the first one's names this opening, and no earlier one.
    limit = timeout + _SLACK_S  # the others' own deadline comes first, and says more
    return Settlement(default_store(), str(reports[0]["token"]), rank, ranks, limit)


def default_store() -> object:
    """Give the store of torch's default process group.

    Raises:
        ConfigError: there is none.
    """
    ask = getattr(dist.distributed_c10d, "_get_default_store", None)
    if ask is None or not dist.is_initialized():
        raise ConfigError(
            "no store to meet at",
            next_step="call torch.distributed.init_process_group first, or give store=",
        )
    return ask()


class _Opening:
    """Opens a rank's ends one kind at a time; between two, all ranks hear whether it went well."""

    def __init__(
        self,
        settings: Settings,
        wiring: Wiring,
        rank: int,
        where: dict[str, Any],
        listen: str | None,
    ) -> None:
        self._settings, self._wiring, self._rank = settings, wiring, rank
        self._where, self._listen = where, listen
        self._ends = Ends(on_gpu=where["device"] != "cpu")

    def open(self, settle: _Settle) -> Ends:
        # A mailbox of an earlier session may have published under this name: nobody looks before
        # all mailboxes have.
        for action in (self._open_mailbox, self._open_outboxes, self._wait_ready):
            try:
                settle(_problem_of(action))
            except BaseException:
                self._ends.closing.close()
                raise
        return self._ends

    def _open_mailbox(self) -> None:
        if self._wiring.sources is None:
            return
        mailbox = Mailbox(
            self._wiring.plan,
            self._wiring.sources,
            depth=self._wiring.depth,
            name=self._channel(self._rank),
            listen=self._listen,
            **self._where,
        )
        self._ends.closing.callback(mailbox.close)
        self._ends.mailbox = mailbox

    def _open_outboxes(self) -> None:
        here = dict(self._where)
        # With all the slots that the schedule needs, credit never depends on what a waiting push
        # holds up: it may wait for it as long as for anything.
        if self._wiring.enough:
            here["credit_wait"] = self._settings.timeout
        if not self._ends.on_gpu:
            del here["device"]
        for consumer in self._wiring.consumers:
            outbox = Outbox(self._wiring.plan, self._rank, name=self._channel(consumer), **here)
            self._ends.closing.callback(outbox.close)
            self._ends.outboxes.append(outbox)

    def _wait_ready(self) -> None:
        if self._ends.mailbox is not None:
            self._ends.mailbox.wait_ready()

    def _channel(self, consumer: int) -> str:
        return f"{self._settings.name}-{consumer}"


def _problem_of(action: Callable[[], None]) -> Exception | None:
    try:
        action()
    except Exception as error:  # noqa: BLE001 - raised by settle, once all ranks know of it
        return error
    return None
