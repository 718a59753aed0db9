"""One producer's process feeds several consumers."""

from __future__ import annotations

import pytest
import torch

from support.channels import LIMIT, Maker
from support.payloads import payload, same_bits
from tapchannel import PassAborted, TapPlan

PLAN = TapPlan({"tap": ["tap"]}, 8, "float16", 4)


def test_two_consumers_of_one_tensor(channel_of: Maker) -> None:
    """Bug: state shared by two lanes of one process: one consumer's credit is the other's."""
    quick, slow = (channel_of(PLAN, depth=depth) for depth in (2, 1))
    with quick.open_pass(1, 4), slow.open_pass(9, 4):
        for microbatch in range(4):
            tensor = payload(microbatch, 4, 8, "float16")
            for channel in (quick, slow):
                channel.producer.push(microbatch, "tap", tensor)
            with quick.mailbox.recv(microbatch) as taps:
                assert same_bits(taps["tap"], tensor)
        for microbatch in range(4):
            with slow.mailbox.recv(microbatch) as taps:
                assert same_bits(taps["tap"], payload(microbatch, 4, 8, "float16"))


def test_one_consumers_abort_leaves_the_other_alone(channel_of: Maker) -> None:
    """Bug: an abort that reaches every lane of the producer's process."""
    sound, failing = channel_of(PLAN, depth=1), channel_of(PLAN, depth=1)
    with sound.open_pass(1, 2):
        sound.producer.push(0, "tap", torch.ones(4, 8, dtype=torch.float16))
        with pytest.raises(PassAborted):
            with failing.open_pass(1, 2):
                failing.producer.push(0, "tap", torch.ones(4, 8, dtype=torch.float16))
                failing.mailbox.abort("this one only")
                failing.heard()
                failing.producer.push(1, "tap", torch.ones(4, 8, dtype=torch.float16))
        sound.producer.push(1, "tap", torch.full((4, 8), 2.0, dtype=torch.float16))
        for microbatch in range(2):
            with sound.mailbox.recv(microbatch, timeout=LIMIT) as taps:
                assert (taps["tap"] == microbatch + 1).all()
