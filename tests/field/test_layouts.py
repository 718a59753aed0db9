"""Field report of kind K7: strides, shapes and dtypes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from conformance.test_sources import DTYPES, LAYOUTS
from conformance.test_sources import WIDTH as SOURCE_WIDTH
from field.channel import channel_of
from support.payloads import numbers, same_bits
from tapchannel import TapPlan
from tapchannel.errors import PassAborted, UsageError

ROWS, WIDTH = 6, 8


# ---- A15


@pytest.mark.parametrize("layout", LAYOUTS)
def test_field_a15_a_source_arrives_as_its_owner_sees_it(tmp_path: Path, layout: str) -> None:
    """A15 (K7): only a start and a byte count were passed on, and strides ignored."""
    plan = TapPlan({name: [name] for name in DTYPES}, SOURCE_WIDTH, {n: n for n in DTYPES}, 80)
    mailbox, outbox = channel_of(tmp_path, plan)
    with outbox, mailbox, mailbox.open_pass(1, 1), outbox.open_pass(1, 1):
        pushed = {}
        for dtype in DTYPES:
            plain = numbers((layout, dtype), 20, 24, dtype=getattr(torch, dtype))
            pushed[dtype] = LAYOUTS[layout](plain)
            outbox.push(0, dtype, pushed[dtype])
        with mailbox.recv(0) as taps:
            for dtype, source in pushed.items():
                assert taps.info[dtype].shape == source.shape
                rows = source.reshape(-1, SOURCE_WIDTH).contiguous()
                assert same_bits(taps[dtype], rows), dtype


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda: torch.tensor(1.0), id="no dimension"),
        pytest.param(lambda: torch.ones(2, WIDTH, dtype=torch.float16), id="another dtype"),
        pytest.param(lambda: torch.ones(2, 2 * WIDTH, dtype=torch.float16), id="as many bytes"),
    ],
)
def test_field_a15_what_does_not_fit_is_refused(
    tmp_path: Path, wrong: Callable[[], torch.Tensor]
) -> None:
    """A15 (K7): a dtype inferred from the byte count. There is no ``out`` to be filled wrongly."""
    mailbox, outbox = channel_of(tmp_path, TapPlan({"tap": ["tap"]}, WIDTH, "float32", ROWS))
    with outbox, mailbox, pytest.raises(PassAborted), mailbox.open_pass(1, 1):
        with pytest.raises(UsageError), outbox.open_pass(1, 1):
            outbox.push(0, "tap", wrong())
        with pytest.raises(TypeError):
            mailbox.recv(0, out=torch.empty(WIDTH, ROWS).t())  # type: ignore[call-arg]
        mailbox.recv(0)
