"""What a session refuses: each slip is a typed error with its remedy, and the session goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from integration import session_roles as roles
from integration.session_roles import GROUPS, MICROBATCHES, WIDTH, Job
from support.children import Children
from tapchannel.errors import ConfigError
from tapchannel.integrations import agreement, opening
from tapchannel.integrations.wiring import Settings, TapShape, report_of, wire

SETTINGS = Settings(GROUPS, max_rows=9)


def said_of_slips(link: Any, job: Job, rank: int) -> dict[str, str]:
    """Make every slip, each followed by a good step; give what was said of each."""
    said: dict[str, str] = {}
    with roles.attach(job, rank) as session:

        def steps(count: int, step: int | None = None) -> None:
            with session.step(count, step=step):
                for microbatch in range(count):
                    roles.run_forward(job, session, rank, 1, microbatch)
                    if session.is_consumer:
                        with session.take():
                            pass

        def nested() -> None:
            with session.step(), session.step():
                pass

        def taken_early() -> None:
            with session.step():
                session.take()

        def left_out() -> None:
            with session.step():
                roles.run_forward(job, session, rank, 1, 0)

        def forwarded_too_often() -> None:
            steps(MICROBATCHES + 1)

        slips = {
            "step within a step": nested,
            "step that does not grow": lambda: steps(MICROBATCHES, step=1),
            "take outside of a step": session.take,
            "take before any forward": taken_early,
            "incomplete step": left_out,
            "counts that differ": lambda: steps(MICROBATCHES - rank),
            "step of nothing": lambda: steps(0),
        }
        for name, slip in slips.items():
            steps(MICROBATCHES)
            dist.barrier()  # a pass that a slip leaves open here is not the other rank's yet
            said[name] = told(slip)
            dist.barrier()
        steps(MICROBATCHES)
        dist.barrier()
    said["closed"] = told(lambda: steps(MICROBATCHES))
    return said


def told(slip: Any) -> str:
    """Make a slip; give its error's kind and text."""
    try:
        slip()
    except Exception as error:  # noqa: BLE001 - what it is, is what the test asks
        return f"{type(error).__name__}: {error}"
    return "nothing"


EXPECTED: dict[str, Any] = {
    "step within a step": ("UsageError: step: a step is open",) * 2,
    "step that does not grow": ("UsageError: step: the steps of a session must grow",) * 2,
    "take outside of a step": (
        "UsageError: take: no draft trains on this rank",
        "UsageError: take: no step is open",
    ),
    "take before any forward": (
        "UsageError: take: no draft trains on this rank",
        "UsageError: take: the draft stage has forwarded no microbatch in this step",
    ),
    # Whoever comes second may hear of the other's slip before it can make its own.
    "incomplete step": (("UsageError: ", "PassAborted: "),) * 2,
    # A producer may be gone before it is told; if it notices first, its abort says why.
    "counts that differ": ("", ("ProtocolError: ", "PassAborted: ")),
    "step of nothing": ("ConfigError: ",) * 2,
    "closed": ("ChannelClosed: ",) * 2,
}


@pytest.mark.timeout(120)
def test_slip_is_told_and_the_next_step_works(tmp_path: Path) -> None:
    """Catches: an untyped error, one without a remedy, and a session that a slip has ended."""
    job = Job(tmp_path, settings=Settings(GROUPS, max_rows=9, timeout=5.0))
    with Children(limit=100) as children:
        ranks = [children.start(said_of_slips, job, rank) for rank in range(job.world)]
        results = [child.result() for child in ranks]
    for name, expected in EXPECTED.items():
        for rank, text in enumerate(expected):
            assert results[rank][name].startswith(text), (name, rank, results[rank][name])
            if text:
                assert "next step" in results[rank][name] or "expected" in results[rank][name]
    assert "different microbatch counts" in results[1]["counts that differ"]


# ---- agreement and wiring, on one's own


def column(*produced: dict[str, TapShape]) -> list[Any]:
    """Give the reports of a pipeline; the last rank has the mailbox."""
    facts = {"depth": None, "needs": 1, "consumer": len(produced) - 1}
    return [
        report_of(SETTINGS, taps, {"rank": rank, **facts}, ()) for rank, taps in enumerate(produced)
    ]


def test_tensor_parallel_ranks_that_differ() -> None:
    """Catches: shares of one tap with different widths, of which some would be cut or left out."""
    columns = [
        column({"layer1": TapShape(WIDTH, "float32"), "layer2": TapShape(width, "float32")})
        for width in (WIDTH, WIDTH + 1)
    ]
    with pytest.raises(ConfigError, match="tap 'layer2' differs between tensor-parallel ranks"):
        wire(SETTINGS, columns, 0, 0)


@pytest.mark.parametrize("width", [0, -1, "6", 1 << 40])
def test_impossible_width(width: Any) -> None:
    """Catches: a number of another rank's that is used as a size before it is looked at."""
    made = {"layer1": TapShape(WIDTH, "float32"), "layer2": TapShape(width, "float32")}
    with pytest.raises(ConfigError, match="width"):
        wire(SETTINGS, [column(made)], 0, 0)


def test_unknown_dtype() -> None:
    """Catches: a dtype's name that reaches torch before it is looked up."""
    made = {tap: TapShape(WIDTH, "float31") for tap in ("layer1", "layer2")}
    with pytest.raises(ConfigError, match="float31"):
        wire(SETTINGS, [column(made)], 0, 0)


def test_setting_that_only_one_rank_has() -> None:
    """Catches: ranks of two versions that wire themselves differently without a word."""
    made = {tap: TapShape(WIDTH, "float32") for tap in ("layer1", "layer2")}
    pipeline = column(made, {})
    pipeline[1] = {**pipeline[1], "settings": {**pipeline[1]["settings"], "novel": True}}
    with pytest.raises(ConfigError, match="novel differs between ranks") as caught:
        wire(SETTINGS, [pipeline], 0, 0)
    assert caught.value.rank == 1


@pytest.mark.parametrize("text", [b"\xff", b"[1", b"[" * 100_000, b"[]", b"3"])
def test_report_that_is_no_report(text: bytes) -> None:
    """Catches: bytes of another collective, taken for a report, that end in an untyped error."""
    with pytest.raises(ConfigError, match="a rank's report is no JSON"):
        agreement._parsed(text)


def test_no_store_to_meet_at() -> None:
    """Catches: an AttributeError of torch's in place of the remedy."""
    with pytest.raises(ConfigError, match="call torch.distributed.init_process_group first"):
        opening.default_store()


def test_alone_without_a_group() -> None:
    """Catches: a rank without a tensor-parallel group that waits for others."""
    assert list(agreement.gather({"rank": 3}, None)) == [{"rank": 3}]


@pytest.mark.parametrize("changes", [{"max_rows": 0}, {"max_rows": True}, {"groups": {}}])
def test_impossible_settings(changes: dict[str, Any]) -> None:
    """Catches: a setting that fails only once the ranks are waiting for each other."""
    with pytest.raises(ConfigError):
        replace(SETTINGS, **changes)


BOTH = {tap: TapShape(WIDTH, "float32") for tap in ("layer1", "layer2")}


def test_ranks_that_see_the_draft_elsewhere() -> None:
    """Catches: a producer that pushes to a mailbox of another rank than the one that takes."""
    pipeline = column(BOTH, {})
    pipeline[0] = {**pipeline[0], "consumer": 0}
    with pytest.raises(ConfigError, match="ranks disagree on where the draft trains"):
        wire(SETTINGS, [pipeline], 0, 0)


def test_another_version_is_named_first() -> None:
    """Catches: a report of another version, which may lack anything, that ends in a KeyError."""
    pipeline = column(BOTH, {})
    pipeline[1] = {"rank": 1, "settings": {"tapchannel": "0.0.9"}}
    with pytest.raises(ConfigError, match="tapchannel differs between ranks"):
        wire(SETTINGS, [pipeline], 0, 0)


@pytest.mark.parametrize(
    ("depth", "needs", "enough"), [(2, 2, True), (2, 3, False), (2, None, False), (None, 3, True)]
)
def test_whether_the_slots_are_enough(depth: int | None, needs: int | None, enough: bool) -> None:
    """Catches: a push that waits out its limit for credit that this very wait keeps from coming."""
    facts = {"rank": 0, "consumer": 0, "depth": depth, "needs": needs}
    wiring = wire(SETTINGS, [[report_of(SETTINGS, BOTH, facts, ())]], 0, 0)
    assert (wiring.depth, wiring.enough) == (depth or needs, enough)


def test_slots_that_nobody_knows() -> None:
    """Catches: a mailbox of a made-up depth where the schedule's need is not known."""
    facts = {"rank": 0, "consumer": 0, "depth": None, "needs": None}
    with pytest.raises(ConfigError, match="how many slots .* — next step: give depth"):
        wire(SETTINGS, [[report_of(SETTINGS, BOTH, facts, ())]], 0, 0)
