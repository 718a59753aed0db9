"""From what all ranks said to who pushes what to whom. Pure, so that every rank comes to the same.

::

                 tp rank 0        tp rank 1
    stage 0      producer         producer        share t of each tap's rows is pushed by tp rank t,
    stage 1      producer         producer        to every mailbox of the row below ("whole") or to
    draft stage  mailbox          mailbox         the one of its own column ("share")

A column is one pipeline; the columns that a tensor-parallel group joins are wired together. Other
coordinates (context, data parallel) have pipelines and a wiring of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final, cast

from .. import __version__
from ..errors import ConfigError
from ..keys import checked_int
from ..plan import Shard, TapPlan
from ..settings import checked_choice
from .agreement import Report

LAYOUTS: Final = ("whole", "share")


@dataclass(frozen=True, slots=True)
class TapShape:
    """What a rank says of a tap that it produces: elements in a row, and their type's name."""

    width: int
    dtype: str


@dataclass(frozen=True)
class Settings:
    """What must be equal on all ranks of a session.

    ``groups`` names the taps that the draft reads side by side, in its order. ``max_rows`` is the
    most rows (tokens) of one whole microbatch: of all tensor-parallel ranks, of one
    context-parallel rank. ``sequence_parallel`` says that hidden states hold 1/tp of them.
    ``layout`` is what a draft rank sees: ``"whole"``, all rows, or ``"share"``, its own 1/tp.
    ``copy`` copies each tap on the compute stream before it is pushed, for trainers that free or
    overwrite hidden states behind torch's back.
    """

    groups: Mapping[str, Sequence[str]]
    max_rows: int
    sequence_parallel: bool = False
    layout: str = "whole"
    copy: bool = False
    name: str = "draft"
    timeout: float = 120.0
    transport: str = "auto"

    def __post_init__(self) -> None:
        checked_choice("layout", self.layout, LAYOUTS)
        checked_int("max_rows", self.max_rows, 1, 1 << 31)
        if not any(self.groups.values()):
            raise ConfigError("a session without taps", next_step="name at least one layer")

    @property
    def taps(self) -> tuple[str, ...]:
        """All taps, in the order of the groups."""
        return tuple(tap for taps in self.groups.values() for tap in taps)


@dataclass(frozen=True)
class Wiring:
    """What one rank opens: its mailbox, if it trains the draft, and the mailboxes it pushes to."""

    plan: TapPlan
    depth: int
    enough: bool  # whether there are all the slots that the schedule needs
    share: tuple[int, int]
    sources: Mapping[int, Sequence[Shard]] | None
    consumers: tuple[int, ...]


def report_of(
    settings: Settings,
    produces: Mapping[str, TapShape],
    facts: Mapping[str, int | None],
    refusals: Sequence[str],
) -> Report:
    """Say what a rank brings: its ``rank`` and its ``consumer``'s, both global, the slots that its
    schedule ``needs``, if known, and the ``depth`` that it was told, if any.
    """
    more = {"groups": _plain(settings.groups), "depth": facts["depth"]}
    return {
        "rank": facts["rank"],
        "consumer": facts["consumer"],
        "needs": facts["needs"],
        "settings": {"tapchannel": __version__, **asdict(settings), **more},
        "produces": {tap: [shape.width, shape.dtype] for tap, shape in produces.items()},
        "refusals": list(refusals),
    }


def wire(settings: Settings, columns: Sequence[Sequence[Report]], column: int, rank: int) -> Wiring:
    """Wire one rank, once all that was said fits together.

    ``columns`` are the pipelines that a tensor-parallel group joins; ``column`` is this rank's.

    Raises:
        ConfigError: on every rank alike, if any rank refused, settings differ, or a tap is made by
            no stage, by two, or by some of a stage's ranks only.
    """
    reports = [report for pipeline in columns for report in pipeline]
    _check_refusals(reports)
    _check_equal(reports)
    _check_consumers(columns)
    makers = [_makers(settings, pipeline) for pipeline in columns]
    shapes = _shapes(settings, makers)
    count = len(columns)
    whole = settings.layout == "whole"
    rows = settings.max_rows if whole else -(-settings.max_rows // count)
    plan = TapPlan(
        {group: list(taps) for group, taps in settings.groups.items()},
        {tap: shapes[tap].width for tap in settings.taps},
        _dtypes(settings, shapes),
        rows,
    )
    asked = cast("Mapping[str, object]", reports[0]["settings"])["depth"]
    needs = _needs(reports)
    depth = asked if isinstance(asked, int) else needs
    if depth is None:
        raise ConfigError("how many slots the schedule needs is not known", next_step="give depth")
    mailboxes = [_number(pipeline[0], "consumer") for pipeline in columns]
    seen = range(count) if whole else (column,)
    sources: dict[int, list[Shard]] = {}
    for index in seen:
        for tap, maker in makers[index].items():
            share = (index, count) if whole else (0, 1)
            sources.setdefault(_number(maker, "rank"), []).append(Shard(tap, share))
    pushes = any(_number(maker, "rank") == rank for maker in makers[column].values())
    targets = tuple(mailboxes) if whole else (mailboxes[column],)
    return Wiring(
        plan,
        depth,
        needs is not None and depth >= needs,
        (column, count),
        sources if mailboxes[column] == rank else None,
        targets if pushes else (),
    )


def _check_refusals(reports: Sequence[Report]) -> None:
    refused = [
        f"rank {report['rank']}: {reason}"
        for report in reports
        for reason in cast("list[str]", report.get("refusals", ()))  # another version's may lack it
    ]
    if refused:
        raise ConfigError("this trainer cannot be tapped as it is set", detail="; ".join(refused))


def _check_equal(reports: Sequence[Report]) -> None:
    first = cast("Mapping[str, object]", reports[0]["settings"])
    for report in reports:
        theirs = cast("Mapping[str, object]", report["settings"])
        for name in dict.fromkeys([*first, *theirs]):
            if first.get(name) != theirs.get(name):
                raise ConfigError(
                    f"{name} differs between ranks",
                    rank=_number(report, "rank"),
                    seen=repr(theirs.get(name)),
                    expected=f"{first.get(name)!r}, as rank {reports[0]['rank']} has it",
                    next_step="give attach the same arguments on every rank",
                )


def _check_consumers(columns: Sequence[Sequence[Report]]) -> None:
    for pipeline in columns:
        named = {str(report["rank"]): _number(report, "consumer") for report in pipeline}
        if len(set(named.values())) > 1:
            raise ConfigError(
                "ranks disagree on where the draft trains",
                seen=", ".join(f"rank {rank}: on rank {there}" for rank, there in named.items()),
                next_step="give attach the same consumer on every rank",
            )


def _needs(reports: Sequence[Report]) -> int | None:
    """Give the slots that the neediest rank needs; None where one does not know."""
    if any(report["needs"] is None for report in reports):
        return None
    return max(_number(report, "needs") for report in reports)


def _makers(settings: Settings, pipeline: Sequence[Report]) -> dict[str, Report]:
    """Find the one rank of a pipeline that makes each tap."""
    makers: dict[str, Report] = {}
    for tap in settings.taps:
        found = [
            report for report in pipeline if tap in cast("dict[str, object]", report["produces"])
        ]
        if len(found) != 1:
            ranks = ", ".join(str(report["rank"]) for report in found)
            raise ConfigError(
                f"tap {tap!r} is made by {'several ranks' if found else 'no rank'} of the pipeline",
                seen=f"rank {ranks}" if found else "none",
                expected=f"one of ranks {', '.join(str(report['rank']) for report in pipeline)}",
                next_step="name layers that exist once in the model, counted over all stages",
            )
        makers[tap] = found[0]
    return makers


def _shapes(settings: Settings, makers: Sequence[Mapping[str, Report]]) -> dict[str, TapShape]:
    shapes: dict[str, TapShape] = {}
    for tap in settings.taps:
        said = [_shape(column[tap], tap) for column in makers]
        if len(set(said)) > 1:
            raise ConfigError(f"tap {tap!r} differs between tensor-parallel ranks", seen=said)
        shapes[tap] = said[0]
    return shapes


def _shape(report: Report, tap: str) -> TapShape:
    width, dtype = cast("Mapping[str, tuple[int, str]]", report["produces"])[tap]
    return TapShape(checked_int(f"width of tap {tap!r}", width, 1, 1 << 31), str(dtype))


def _dtypes(settings: Settings, shapes: Mapping[str, TapShape]) -> dict[str, str]:
    dtypes: dict[str, str] = {}
    for group, taps in settings.groups.items():
        found = {tap: shapes[tap].dtype for tap in taps}
        if len(set(found.values())) > 1:
            raise ConfigError(
                f"taps of group {group!r} have different dtypes",
                seen=", ".join(f"{tap}: {dtype}" for tap, dtype in found.items()),
                next_step="give taps of another dtype a group of their own",
            )
        dtypes[group] = next(iter(found.values()))
    return dtypes


def _number(report: Report, name: str) -> int:
    return checked_int(f"{name} in a rank's report", report[name], 0, 1 << 31)


def _plain(groups: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    return {group: list(taps) for group, taps in groups.items()}
