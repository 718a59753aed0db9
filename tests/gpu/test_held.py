"""A trainer's thread that is held inside the driver right after its push (I6)."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from gpu.channel import TAP, Channel, consuming, producing
from gpu.device import Gate, wrong_words
from gpu.pair import Pair, Peer

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]


def _push_then_block(peer: Peer, channel: Channel) -> list[float]:
    """Push twice for one slot, then copy to the host behind a stream that only both taps free."""
    big = torch.ones(1 << 20, device=channel.producer)
    big.add_(1).cpu()
    gate = Gate()

    def open_gate() -> None:
        peer.wait("both received")
        gate.open()

    opener = threading.Thread(target=open_gate)
    took: list[float] = []
    with producing(channel, peer, credit_wait=10.0) as outbox, outbox.open_pass(1, 2):
        for microbatch in range(2):
            words = channel.words(microbatch)
            torch.cuda.synchronize()
            began = time.perf_counter()
            outbox.push(microbatch, TAP, words)
            took.append(time.perf_counter() - began)
            peer.tell("pushed")
        gate.hold(torch.cuda.current_stream())  # the legacy stream, as most trainers have it
        opener.start()
        big.cpu()  # to pageable memory: the driver's lock is kept until the gate opens
        opener.join()
    return took


def _receive_slowly(peer: Peer, channel: Channel) -> list[int]:
    """Leave the second push without credit for a while, so that it cannot go ahead at once."""
    wrong: list[int] = []
    with consuming(channel, peer) as mailbox, mailbox.open_pass(1, 2):
        peer.wait("pushed")
        time.sleep(0.5)  # not synchronisation: the producer gets time to do it wrong
        for microbatch in range(2):
            with mailbox.recv(microbatch, wait="host") as taps:
                wrong.append(wrong_words(taps[TAP], microbatch))
        peer.tell("both received")
    return wrong


def test_push_is_enqueued_before_the_trainer_is_held(pair: Pair, tmp_path: Path) -> None:
    """Catches a copy left to a thread that the trainer's own next call keeps from the driver."""
    wrong, took = pair.run(_receive_slowly, _push_then_block, Channel(tmp_path.as_uri(), depth=1))
    assert wrong == [0, 0]
    assert took[1] > 0.2 > took[0]  # with credit at once; without, once there is credit
