"""The speed contract: a lane's speed against its link's, at attach."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tapchannel import ConfigError, Mailbox, Outbox, TapPlan, TransportUnavailable
from tapchannel import speed as contract
from tapchannel.speed import Limit, Speed, SpeedCheck, device_rates

PLAN = TapPlan({"taps": ["tap"]}, width=1024, dtype="uint8", max_rows=1024)
FAST = Limit(1e6, "a link that nobody has")


@pytest.fixture
def mailbox(tmp_path: Path) -> Iterator[Mailbox]:
    """Serve one lane in host memory."""
    with Mailbox(PLAN, {0: ["tap"]}, store=tmp_path.as_uri()) as made:
        yield made


@pytest.fixture
def fast_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every lane slower than its link."""
    monkeypatch.setattr("tapchannel.transport.shm.host_limit", lambda _: FAST)


def outbox(store: Path, check: SpeedCheck | None) -> Outbox:
    """Attach."""
    return Outbox(PLAN, 0, store=store.as_uri(), attach_timeout=20.0, speed=check)


def test_info_says_what_was_measured(mailbox: Mailbox, tmp_path: Path) -> None:
    """Catches: a lane that is measured against nothing, and a figure that nobody can see."""
    with outbox(tmp_path, SpeedCheck(0.001)) as made:
        found = made.info()["speed"]
    assert isinstance(found, dict)
    assert found["measured_GB_per_s"] > 0.1
    assert found["share"] == found["measured_GB_per_s"] / found["limit_GB_per_s"]
    assert "fresh memory" in found["limit"]


def test_nothing_is_measured_unasked(mailbox: Mailbox, tmp_path: Path, fast_link: None) -> None:
    """Catches: an attach that takes longer for a check that nobody asked for."""
    with outbox(tmp_path, None) as made:
        assert made.info()["speed"] is None


def test_a_slow_lane_warns(
    mailbox: Mailbox, tmp_path: Path, fast_link: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches: a lane that is slow and says nothing."""
    with caplog.at_level(logging.WARNING, "tapchannel.speed"), outbox(tmp_path, SpeedCheck()):
        pass
    [warning] = [record.getMessage() for record in caplog.records]
    assert "rank 0, lane by shm: measured " in warning
    assert "a link that nobody has" in warning
    assert "at least 50 %" in warning


def test_a_slow_lane_is_refused(mailbox: Mailbox, tmp_path: Path, fast_link: None) -> None:
    """Catches: a refusal that leaves the lane taken, or goes on by a slower transport."""
    with pytest.raises(TransportUnavailable) as caught:
        outbox(tmp_path, SpeedCheck(act="refuse"))
    assert "slower than its link" in str(caught.value)
    assert caught.value.rank == 0
    with outbox(tmp_path, None) as made:
        assert made.info()["transport"] == "shm"


def test_measuring_writes_nothing(mailbox: Mailbox, tmp_path: Path) -> None:
    """Catches: a measurement that touches what an open lease reads."""
    with outbox(tmp_path, None) as first, first.open_pass(1, 1), mailbox.open_pass(1, 1):
        first.push(0, "tap", torch.full((1024, 1024), 7, dtype=torch.uint8))
        kept = mailbox.recv(0)
        view = kept["tap"]
    with outbox(tmp_path, SpeedCheck()):
        assert bool((view == 7).all())
    del view, kept


@pytest.mark.ucx
def test_ucx_over_loopback_has_no_known_limit(tmp_path: Path) -> None:
    """Catches: a share of a limit that is made up."""
    with Mailbox(
        PLAN,
        {0: ["tap"]},
        store=tmp_path.as_uri(),
        transport="ucx",
        listen="tcp://127.0.0.1",
        allow_no_secret=True,
    ):
        with outbox(tmp_path, SpeedCheck(act="refuse")) as made:
            found = made.info()["speed"]
    assert isinstance(found, dict)
    assert found["measured_GB_per_s"] > 0
    assert found["share"] is None
    assert "no rate is known" in found["limit"]


def test_what_cannot_be_measured_is_not_judged(caplog: pytest.LogCaptureFixture) -> None:
    """Catches: an attach that fails since its speed is not known."""

    def broken() -> float:
        raise RuntimeError("no answer")

    check = SpeedCheck(act="refuse")
    found = contract.checked(check, "default", 0, "ucx", broken, contract.no_limit)
    assert found is not None
    assert found.share is None
    assert "no answer" in found.limit.source
    assert not caplog.records


def test_device_rates(tmp_path: Path) -> None:
    """Catches: a unit that is misread, and a device without a rate that counts as one."""
    net = tmp_path / "class" / "net"
    port = tmp_path / "class" / "infiniband" / "mlx5_0" / "ports" / "1"
    for folder, file, text in ((net / "eth0", "speed", "25000"), (net / "tap0", "speed", "-1")):
        folder.mkdir(parents=True)
        (folder / file).write_text(text)
    port.mkdir(parents=True)
    (port / "rate").write_text("200 Gb/sec (4X HDR)\n")
    assert device_rates(["tcp/eth0"], tmp_path).speed == 3.125
    both = device_rates(["rc_mlx5/mlx5_0:1", "dc_mlx5/mlx5_0:1"], tmp_path)
    assert both == Limit(25.0, "the rate of mlx5_0:1")
    for unknown in (["tcp/tap0"], ["tcp/lo"], ["posix/memory"], ["tcp/eth0", "tcp/lo"], []):
        assert device_rates(unknown, tmp_path).speed == 0


@pytest.mark.parametrize(
    ("share", "act"), [(0, "warn"), (1.1, "warn"), (True, "warn"), ("half", "warn"), (0.5, "stop")]
)
def test_impossible_checks_are_refused(share: float, act: str) -> None:
    """Catches: a percentage taken for a share, and an act that does nothing."""
    with pytest.raises(ConfigError):
        SpeedCheck(share, act)


def test_verdict_is_of_the_share() -> None:
    """Catches: a comparison the wrong way round."""
    assert Speed(4.9, Limit(10.0, "x")).verdict(SpeedCheck())
    assert not Speed(5.0, Limit(10.0, "x")).verdict(SpeedCheck())
    assert not Speed(4.9, Limit(0.0, "x")).verdict(SpeedCheck())
    assert not Speed(0.0, Limit(10.0, "x")).verdict(SpeedCheck())
