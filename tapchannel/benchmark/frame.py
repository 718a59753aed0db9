"""How everything is measured: all peers in turns, their payload checked before and after."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from rich.console import Console

from .peer import Peer
from .record import Kind, Metric, Row
from .rounds import Round
from .samples import ratios
from .settings import Options
from .team import Answers, Meetings, PeerFailed, Team
from .traffic import Traffic

LOG: Final = "peers.log"  # what they said to the terminal
LIMIT: Final = "bare copy"
OURS: Final = "tapchannel"
_CHECKED: Final = 6  # messages, at least, of a round that is checked in full
_CURVE: Final = 2000  # samples of a curve that are kept


class PayloadWrong(PeerFailed):
    """What arrived is not what was sent."""


@dataclass(frozen=True)
class Figure:
    """One round's figure."""

    unit: str
    kind: Kind
    value: float


Measured = Mapping[str, Figure]


@dataclass
class Case:
    """One case of a scenario: its messages, and one round of it by a team."""

    label: str
    traffic: Traffic
    once: Callable[[Team], tuple[Measured, Sequence[float]]]
    case: dict[str, Any]
    rounds: int
    warm_up: int = 1
    against: str = ""  # the figure whose ratio to the limit's is given


@dataclass
class Tally:
    """What the checks of one peer found in one case."""

    checked: int = 0
    wrong: int = 0

    def add(self, answers: Answers) -> None:
        """Add a round's."""
        self.checked += sum(one.checked for one in answers.all)
        self.wrong += sum(one.wrong for one in answers.all)


@dataclass
class Crew:
    """The teams of a scenario. One that fails is ended; its rows say why from then on."""

    scenario: str
    live: dict[str, Team] = field(default_factory=dict[str, Team])
    out: dict[str, Row] = field(default_factory=dict[str, Row])

    def lose(self, name: str, status: Any, reason: str) -> None:
        """Go on without a peer."""
        team = self.live.pop(name, None)
        if team is not None:
            team.end(in_peace=False)
        self.out[name] = Row(self.scenario, "", name, status=status, reason=reason)

    def attempt(self, name: str, action: Callable[[Team], Any]) -> Any:
        """Do something with a team, and go on without it where it fails; None then."""
        try:
            return action(self.live[name])
        except PeerFailed as error:
            self.lose(name, "wrong" if isinstance(error, PayloadWrong) else "failed", str(error))
            return None

    def rows_of_lost(self, case: Case) -> list[Row]:
        """Give a row to each peer that is not there."""
        return [
            Row(row.scenario, case.label, name, case.case, status=row.status, reason=row.reason)
            for name, row in self.out.items()
        ]


class Bench:
    """What the scenarios share: options, peers, and the rows that they made."""

    def __init__(self, options: Options, peers: Mapping[str, Peer], console: Console) -> None:
        self.options, self.console = options, console
        self.peers = peers
        self.rows: list[Row] = []
        self._meetings = Meetings()
        options.out.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def crew(
        self,
        scenario: str,
        wanted: Sequence[str],
        producers: int,
        one_sided: bool = True,
        others: bool = True,
    ) -> Generator[Crew, None, None]:
        """Start the teams of the peers that a scenario wants, or the user has asked for.

        ``one_sided``: it has something to measure of peers without a consumer. ``others``: it can
        measure peers that it does not want by itself.
        """
        asked = self.options.peers or wanted
        with ExitStack() as held:
            crew = Crew(scenario)
            for name in asked if others else [name for name in asked if name in wanted]:
                reason = self._absence(name, producers, one_sided)
                if reason is not None:
                    crew.lose(name, "missing", reason)
                    continue
                options, log = self.options, self.options.out / LOG
                place, meetings = options.place, self._meetings
                team = Team(self.peers[name], options.extra, place, producers, meetings, log)
                held.callback(team.end, in_peace=True)
                crew.live[name] = team
            for name in list(crew.live):
                crew.attempt(name, Team.__enter__)
            yield crew

    def _absence(self, name: str, producers: int, one_sided: bool) -> str | None:
        peer = self.peers.get(name)
        if peer is None:
            return "its file is not here: --extra-peers FOLDER, bench/peers of the source tree"
        if peer.one_sided and not one_sided:
            return "it has no consumer, of which there is something to measure here"
        return peer.absence(self.options.place, producers)

    def measure(self, crew: Crew, case: Case) -> list[Row]:
        """Measure one case by all teams in turns; give and keep its rows."""
        self.console.print(f"{crew.scenario}: {case.label}", style="dim")
        tallies = {name: Tally() for name in crew.live}
        taken: dict[str, list[Measured]] = {name: [] for name in crew.live}
        curves: dict[str, list[float]] = {name: [] for name in crew.live}
        for name in list(crew.live):
            crew.attempt(name, lambda team: team.open(case.traffic))
        self._check(crew, case, tallies)
        for number in range(case.warm_up + case.rounds):
            for name in list(crew.live):
                seen = crew.attempt(name, case.once)
                if seen is not None and number >= case.warm_up:
                    taken[name].append(seen[0])
                    curves[name].extend(seen[1])
        self._check(crew, case, tallies)
        for name in list(crew.live):
            crew.attempt(name, Team.close)
        rows = [
            self._row(crew, case, name, taken[name], curves[name], tallies[name])
            for name in list(crew.live)
        ]
        _compare_with_limit(rows, case.against)
        rows += crew.rows_of_lost(case)
        self.rows += rows
        return rows

    def _check(self, crew: Crew, case: Case, tallies: Mapping[str, Tally]) -> None:
        """Have a round of messages compared in every byte."""
        count = max(_CHECKED, case.traffic.depth + 1)  # so that slots are used twice
        for name in list(crew.live):
            if crew.live[name].peer.unchecked:
                continue
            answers = crew.attempt(
                name, lambda team: team.round(Round("stream", team.next_step(), count, check=True))
            )
            if answers is not None:
                tallies[name].add(answers)

    def _row(
        self,
        crew: Crew,
        case: Case,
        name: str,
        taken: Sequence[Measured],
        curve: list[float],
        tally: Tally,
    ) -> Row:
        row = Row(crew.scenario, case.label, name, case.case)
        for measured in taken:
            for figure, one in measured.items():
                row.metrics.setdefault(figure, Metric(one.unit, one.kind)).samples.append(one.value)
        step = max(1, len(curve) // _CURVE)
        row.curve = sorted(curve)[::step]
        if self.peers[name].unchecked:
            row.check = "unchecked"
        elif tally.wrong:
            row.status = "wrong"
            row.reason = f"{tally.wrong} of {tally.checked} checked messages came wrong"
        else:
            row.check = f"{tally.checked} equal"
        return row


def _compare_with_limit(rows: Sequence[Row], against: str) -> None:
    limit = next((row for row in rows if row.peer == LIMIT and row.status == "ok"), None)
    if limit is None or against not in limit.metrics:
        return
    for row in rows:
        if row is limit or against not in row.metrics:
            continue
        shares = ratios(limit.metrics[against].samples, row.metrics[against].samples)
        name = f"of {LIMIT}"
        row.metrics[name] = Metric("%", "info", [100 * share for share in shares])


def moved(answers: Answers, traffic: Traffic, count: int) -> dict[str, Figure]:
    """Give the figures of a round of messages."""
    seconds = answers.seconds
    return {
        "GB/s": Figure("GB/s", "bandwidth", traffic.message_bytes * count / seconds / 1e9),
        "messages/s": Figure("1/s", "bandwidth", count / seconds),
    }


def stream_once(
    traffic: Traffic, count: int, gate: bool = False
) -> Callable[[Team], tuple[Measured, list[float]]]:
    """Make a round of messages as fast as they go."""

    def once(team: Team) -> tuple[Measured, list[float]]:
        answers = team.round(Round("stream", team.next_step(), count, gate=gate))
        complain(answers)
        return moved(answers, traffic, count), []

    return once


def complain(answers: Answers) -> None:
    """Refuse a timed round whose last message came wrong.

    Raises:
        PayloadWrong: it did.
    """
    if any(one.wrong for one in answers.all):
        raise PayloadWrong("the last message of a timed round came wrong")
