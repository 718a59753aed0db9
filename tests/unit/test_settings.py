"""Settings that both roles check alike."""

from __future__ import annotations

import math

import pytest

from tapchannel.errors import ConfigError
from tapchannel.plan import Shard, TapPlan
from tapchannel.settings import (
    cell_geometry,
    check_mode,
    checked_choice,
    checked_seconds,
    reading_stream,
    secret_bytes,
)

SECRET = "correct horse"


@pytest.mark.parametrize("value", [0, 0.0, 1, 2.5, 86400])
def test_finite_wait_is_taken(value: float) -> None:
    """A limit that is changed on the way."""
    assert checked_seconds("timeout", value) == value


@pytest.mark.parametrize(
    "value", [-1, -0.001, math.inf, -math.inf, math.nan, 86401, 1e300, None, "5", True, [1], 1j]
)
def test_wait_without_end_is_refused(value: object) -> None:
    """A wait that never ends (I3), or a slip such as ``timeout=True`` taken for one second."""
    with pytest.raises(ConfigError) as raised:
        checked_seconds("timeout", value)  # type: ignore[arg-type]
    assert "timeout" in str(raised.value)
    assert repr(value) in str(raised.value)
    assert " s" in str(raised.value.expected)


@pytest.mark.parametrize("value", ["Wait", "", None, 0, ["wait"], ("wait", "drop_newest")])
def test_unknown_choice_is_refused_with_those_there_are(value: object) -> None:
    """A slip in a policy's name that falls back to the default in silence."""
    with pytest.raises(ConfigError) as raised:
        checked_choice("when_full", value, ("wait", "drop_newest"))  # type: ignore[arg-type]
    assert "'wait' or 'drop_newest'" in str(raised.value)
    assert "when_full" in str(raised.value)


def test_secret_comes_from_argument_or_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """An argument that the environment overrides, or a secret that is dropped."""
    monkeypatch.delenv("TAPCHANNEL_SECRET", raising=False)
    assert secret_bytes(None) is None
    monkeypatch.setenv("TAPCHANNEL_SECRET", SECRET)
    assert secret_bytes(None) == SECRET.encode()
    assert secret_bytes("another one") == b"another one"
    assert secret_bytes(b"\xff" * 8) == b"\xff" * 8


@pytest.mark.parametrize("secret", ["", "seven77", b"seven77"])
def test_short_secret_is_refused_and_not_echoed(secret: str | bytes) -> None:
    """No secret at all where one was meant; a secret in the error's text."""
    with pytest.raises(ConfigError) as raised:
        secret_bytes(secret)
    assert "8 bytes" in str(raised.value)
    assert "seven77" not in str(raised.value)


@pytest.mark.parametrize("secret", [12345678, 1.5, ["a"] * 8], ids=repr)
def test_secret_of_another_type_is_refused(secret: object) -> None:
    """A TypeError from the depth of the handshake, or a list that passes for bytes."""
    with pytest.raises(ConfigError, match="secret"):
        secret_bytes(secret)  # type: ignore[arg-type]


def test_secret_that_is_no_text_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A secret of random bytes, which the environment hands over as surrogates."""
    monkeypatch.setenv("TAPCHANNEL_SECRET", "raw\udcff\udcfe-bytes")
    assert secret_bytes(None) == b"raw\xff\xfe-bytes"


@pytest.mark.parametrize(
    ("value", "on"), [(None, False), ("", False), ("0", False), ("1", True), ("yes", True)]
)
def test_check_mode(monkeypatch: pytest.MonkeyPatch, value: str | None, on: bool) -> None:
    """A check that is off when asked for, or on when not."""
    monkeypatch.delenv("TAPCHANNEL_CHECK", raising=False)
    if value is not None:
        monkeypatch.setenv("TAPCHANNEL_CHECK", value)
    assert check_mode() is on


def test_host_memory_has_no_stream() -> None:
    """A look at torch.cuda where there is none."""
    assert reading_stream(None, None) == (None, 0)


def test_cell_geometry_is_what_the_plan_laid_out() -> None:
    """A field in another's place: the native core would write beside the cell."""
    plan = TapPlan({"g": ["a", "b"], "h": ["c"]}, 8, {"g": "bfloat16", "h": "int64"}, 6)
    (lane,) = [lane for lane in plan.lanes(SHARED) if lane.rank == 2]
    begins = {name: plan.group(name).offset for name in "gh"}
    codes = {name: plan.group(name).dtype for name in "gh"}
    assert cell_geometry(lane, plan.max_rows) == [
        # offset, row bytes, pitch, the cell's rows, the tap's rows, dtype, poison, tap, counts,
        # width
        (begins["g"] + 16 + 8, 8, 32, 6, 6, codes["g"].code, codes["g"].poison_byte, 1, 0, 4),
        (begins["h"], 64, 64, 3, 6, codes["h"].code, codes["h"].poison_byte, 2, 1, 8),
    ]


SHARED = {
    1: ["a", Shard("b", columns=(0, 2)), Shard("c", rows=(0, 2))],
    2: [Shard("b", columns=(1, 2)), Shard("c", rows=(1, 2))],
}
