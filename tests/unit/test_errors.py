"""The error tree: its shape, its fields, its text, and its way from process to process."""

from __future__ import annotations

import copy
import pickle

import pytest

from tapchannel import errors
from tapchannel.errors import (
    AttachError,
    ChannelClosed,
    ConfigError,
    CreditTimeout,
    DeviceError,
    PassAborted,
    PlanMismatchError,
    StampTimeout,
    TapChannelError,
    TapTimeout,
    TransportUnavailable,
    UsageError,
    WouldBlock,
)
from tapchannel.keys import Key

COMMON = {
    "channel": "draft",
    "lane": 4,
    "rank": 17,
    "host": "node-three",
    "pid": 7711,
    "stage": 23,
    "key": Key(epoch=2, step=1201, microbatch=37),
    "tap": "layer9",
    "slot": 5,
    "seen": "pass 1200",
    "expected": "pass 1201",
    "waited": 59.5,
    "limit": 60.0,
    "last_progress": "announce 2.0 s ago",
    "cause": "rank is slow",
    "next_step": "look at its log",
    "detail": "credit was given",
}
OWN = {
    PlanMismatchError: {
        "rows": (
            {"rank": 31, "expected": "width 8", "claimed": "width 9", "problem": "other width"},
            {"rank": None, "expected": "'tap7'", "claimed": "nothing", "problem": "missing"},
        )
    },
    AttachError: {"reason": "wrong secret"},
    TransportUnavailable: {"refused": {"cuda_ipc": "no driver", "ucx": "no library"}},
    DeviceError: {
        "call": "cuMemAlloc",
        "code": 2,
        "name": "CUDA_ERROR_OUT_OF_MEMORY",
        "meaning": "no memory left",
    },
    PassAborted: {"who": "the consumer", "reason": "loss is not finite"},
}


def all_kinds(root: type[TapChannelError] = TapChannelError) -> list[type[TapChannelError]]:
    """List the tree's classes, those that tests derive left out."""
    below = [kind for kind in root.__subclasses__() if kind.__module__ == errors.__name__]
    return [root, *(kind for child in below for kind in all_kinds(child))]


@pytest.fixture(params=all_kinds(), ids=lambda kind: kind.__name__)
def full(request: pytest.FixtureRequest) -> TapChannelError:
    """One error of each class with every field given."""
    return request.param("it failed", **COMMON, **OWN.get(request.param, {}))


def leaves(value: object) -> list[str]:
    """Write every scalar inside a field as it should stand in the text."""
    if isinstance(value, dict):
        return [leaf for item in value.items() for leaf in leaves(item)]
    if isinstance(value, tuple):
        return [leaf for item in value for leaf in leaves(item)]
    return [] if value is None else [str(value)]


def test_every_error_keeps_its_fields(full: TapChannelError) -> None:
    """Bug: a class that drops a field, so that a handler cannot ask which rank is guilty."""
    wanted = {"what": "it failed", **COMMON, **OWN.get(type(full), {})}
    assert {name: getattr(full, name) for name in wanted} == wanted


def test_every_field_is_in_the_text(full: TapChannelError) -> None:
    """Bug: a message that hides what the error knows (I3 asks for all of it)."""
    text = str(full)
    own = OWN.get(type(full), {})
    facts = [leaf for value in (*COMMON.values(), *own.values()) for leaf in leaves(value)]
    facts = [fact for fact in facts if fact not in {"rank", "expected", "claimed", "problem"}]
    assert [fact for fact in facts if fact not in text] == []


def test_every_error_survives_pickle_and_copy(full: TapChannelError) -> None:
    """Bug: an error that a child process raises and its parent cannot rebuild."""
    for twin in (pickle.loads(pickle.dumps(full)), copy.copy(full), copy.deepcopy(full)):
        assert type(twin) is type(full)
        assert twin.args == full.args
        assert vars(twin) == vars(full)
        assert str(twin) == str(full)


class SteppedTimeout(StampTimeout):
    """A subclass whose signature is its own and asks for more than one argument."""

    def __init__(self, step: int, tries: int) -> None:
        super().__init__(f"step {step} failed", cause=f"{tries} tries")
        self.tries = tries


def test_subclass_with_its_own_signature_survives_pickle() -> None:
    """Bug: unpickling by calling the class with ``args``, which a subclass need not accept."""
    twin = pickle.loads(pickle.dumps(SteppedTimeout(7, tries=3)))
    assert type(twin) is SteppedTimeout
    assert twin.tries == 3
    assert str(twin) == "step 7 failed — likely cause: 3 tries"


def test_fields_not_given_are_none_and_leave_no_trace() -> None:
    """Bug: "lane None" in a message, or an attribute that exists on some errors only."""
    error = WouldBlock("nothing landed yet")
    assert str(error) == "nothing landed yet"
    assert {getattr(error, name) for name in COMMON} == {None}


def test_zero_is_a_fact() -> None:
    """Bug: ``if field`` for ``if field is not None`` loses rank 0, lane 0 and a limit of 0 s."""
    text = str(CreditTimeout("no credit", rank=0, lane=0, slot=0, pid=0, waited=0.0, limit=0.0))
    assert text == "no credit: slot 0, lane 0, producer rank 0 in process 0 — waited 0.0 s of 0.0 s"


def test_parts_stand_in_the_agreed_order() -> None:
    """Bug: a text whose parts move about, so that nobody learns to read it."""
    error = StampTimeout(
        "stamp of tap 'layer17' did not land",
        channel="draft",
        lane=1,
        rank=1,
        host="n3",
        pid=77,
        key=Key(epoch=1, step=12, microbatch=3),
        seen=Key(epoch=1, step=11, microbatch=3),
        expected=Key(epoch=1, step=12, microbatch=3),
        waited=60.0,
        limit=60.0,
        cause="rank 1 is late",
        next_step="look at rank 1",
    )
    assert str(error) == (
        "stamp of tap 'layer17' did not land: channel 'draft', pass 12, microbatch 3, lane 1, "
        "producer rank 1 on host n3 (pid 77) — seen pass 11, microbatch 3, "
        "expected pass 12, microbatch 3 — waited 60.0 s of 60.0 s — "
        "likely cause: rank 1 is late — next step: look at rank 1"
    )


@pytest.mark.parametrize(
    ("duration", "text"), [(0.0, "0.0 s"), (0.05, "50 ms"), (0.00012, "0.12 ms"), (120, "120.0 s")]
)
def test_durations_carry_their_unit(duration: float, text: str) -> None:
    """Bug: "waited 0.0 s of 0.0 s" for a limit of 50 ms."""
    assert f"limit {text}" in str(TapTimeout("late", limit=duration))


def test_unknown_field_is_refused() -> None:
    """Bug: a misspelt field name that is swallowed, so the fact is lost from the text."""
    with pytest.raises(TypeError, match="microbach"):
        UsageError("wrong call", microbach=3)  # pyright: ignore[reportCallIssue]


def test_a_peers_text_cannot_forge_the_terminal() -> None:
    """Bug: an attach reason with escape sequences, or a table cell that starts a new row."""
    hostile = "\x1b[2J\r\u202eok\udc80"
    error = AttachError("refused", reason=hostile, host=hostile, channel=hostile)
    assert not set(hostile) & set(str(error)) - set("[2Jok")
    rows = [{"rank": 1, "expected": "a", "claimed": "b\n2  a  a", "problem": hostile}]
    assert len(str(PlanMismatchError("differ", rows=rows)).splitlines()) == 3


def test_plan_mismatch_prints_a_line_per_rank_in_columns() -> None:
    """Bug: a table whose cells do not stand below their headings."""
    _, *lines = str(PlanMismatchError("differ", rows=OWN[PlanMismatchError]["rows"])).splitlines()
    head, first, second = lines
    column = head.index("claimed")
    assert (first[column:][:7], second[column:][:7]) == ("width 9", "nothing")
    assert first.split()[0] == "31"
    assert second.split()[0] == "-"


def test_the_drawing_is_the_tree() -> None:
    """Bug: a class added to the module, or moved, and not drawn at its top."""
    drawn: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        mark = max(line.find("├─ "), line.find("└─ "))
        if mark >= 0:
            drawn.append(((mark - 4) // 3, line[mark + 3 :].split()[0]))
    actual = [
        (
            kind.__mro__.index(TapChannelError) - 1
            if kind.__mro__[1] is not TapChannelError
            else 0,
            kind.__name__
            + "".join(f"({b.__name__})" for b in kind.__bases__ if b.__module__ == "builtins"),
        )
        for kind in all_kinds()[1:]
    ]
    assert sorted(drawn) == sorted(actual)


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [(ConfigError, ValueError), (UsageError, RuntimeError), (CreditTimeout, TimeoutError)],
)
def test_builtin_handlers_catch_them(kind: type[TapChannelError], builtin: type[Exception]) -> None:
    """Bug: trainers that catch ``TimeoutError`` and the like miss ours."""
    with pytest.raises(builtin):
        raise kind("it failed")


def test_siblings_do_not_catch_each_other() -> None:
    """Bug: a normal end that an ``except TapTimeout`` takes for a late rank."""
    assert not issubclass(ChannelClosed, TapTimeout)
    assert not issubclass(WouldBlock, TapTimeout)
