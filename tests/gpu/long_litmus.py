"""The long litmus: does a stamp ever overtake its payload, from any GPU here to cuda:0?

    cd tests && python -m gpu.long_litmus --messages 1000000

Two pairs of processes for each producing GPU, all at once: the consumer of one waits on its
stream, the other's on its host. Messages of 4 KiB to 8 MiB, as many of each power of two. A kernel
right behind the wait compares every word. Exit code 1: one was wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gpu.channel import TAP, Channel, consuming, producing
from gpu.device import numbers
from gpu.pair import Pair, Peer
from tapchannel.benchmark.facts import facts
from tapchannel.benchmark.traffic import Place

LIMIT = 480.0
PASS = 10_000  # messages of a pass
ROWS = [1 << power for power in range(12)]  # of 4 KiB each
WIDTH = 1024
DEPTH = 8
SYNCHRONISE = 32  # messages; the host would run ahead by thousands


def rows_of(message: int) -> int:
    """Give a message's rows: neighbours differ, and what a slot held before differs too."""
    return ROWS[message * 7 % len(ROWS)]


def _passes(messages: int) -> list[tuple[int, int]]:
    return [
        (step, min(PASS, messages - begin))
        for step, begin in enumerate(range(0, messages, PASS), start=1)
    ]


def _push(peer: Peer, channel: Channel, messages: int) -> int:
    base = channel.words(0)
    with producing(channel, peer, timeout=LIMIT, credit_wait=LIMIT) as outbox:
        for step, count in _passes(messages):
            with outbox.open_pass(step, count):
                for microbatch in range(count):
                    rows = rows_of(microbatch + step)
                    outbox.push(microbatch, TAP, base[:rows] + (step * PASS + microbatch))
    return messages


def _compare(peer: Peer, channel: Channel, messages: int, wait: str) -> tuple[int, int]:
    base = numbers(0, channel.rows, channel.width, channel.consumer)
    wrong = torch.zeros((), dtype=torch.int64, device=channel.consumer)
    moved = 0
    with consuming(channel, peer, timeout=LIMIT) as mailbox:
        for step, count in _passes(messages):
            with mailbox.open_pass(step, count):
                for microbatch in range(count):
                    rows = rows_of(microbatch + step)
                    named = rows if wait == "stream" else None
                    with mailbox.recv(microbatch, wait=wait, rows=named) as taps:
                        due = base[:rows] + (step * PASS + microbatch)
                        wrong += (taps[TAP] != due).sum()
                    moved += rows * WIDTH * 4
                    if microbatch % SYNCHRONISE == 0:
                        torch.cuda.synchronize()
        return int(wrong), moved


def _run(pair: Pair, place: tuple[str, str], messages: int) -> dict[str, Any]:
    producer, wait = place
    with tempfile.TemporaryDirectory() as folder:
        channel = Channel(
            Path(folder).as_uri(), width=WIDTH, rows=ROWS[-1], depth=DEPTH, producer=producer
        )
        began = time.monotonic()
        (wrong, moved), pushed = pair.run(
            partial(_compare, messages=messages, wait=wait),
            partial(_push, messages=messages),
            channel,
            limit=LIMIT,
        )
        seconds = time.monotonic() - began
    return {
        "producer": producer,
        "consumer": channel.consumer,
        "wait": wait,
        "messages": pushed,
        "GB": moved / 1e9,
        "wrong words": wrong,
        "seconds": seconds,
    }


def main() -> int:
    """Run all pairs; return 0 if no word was wrong."""
    parser = argparse.ArgumentParser(prog="gpu.long_litmus", description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000, help="of all pairs together")
    parser.add_argument("--out", type=Path, help="add the result to this file, a JSON line")
    arguments = parser.parse_args()
    count = torch.cuda.device_count()
    producers = [f"cuda:{index}" for index in range(1, count)] or ["cuda:0"]
    places = [(producer, wait) for producer in producers for wait in ("stream", "host")]
    each = -(-arguments.messages // len(places))
    pairs = [Pair({}, {}) for _ in places]
    with ThreadPoolExecutor(len(places)) as pool:
        lines = list(pool.map(_run, pairs, places, [each] * len(places)))
    for pair in pairs:
        pair.close()
    for line in lines:
        print({key: round(v, 1) if isinstance(v, float) else v for key, v in line.items()})
    total, wrong = (
        sum(line["messages"] for line in lines),
        sum(line["wrong words"] for line in lines),
    )
    print(f"{total} messages, {wrong} wrong words")
    if arguments.out:
        with arguments.out.open("a") as out:
            command = f"python -m gpu.long_litmus --messages {arguments.messages}"
            known = {**facts([], Place("cuda", count)), "command": command}
            out.write(json.dumps({"facts": known, "pairs": lines}) + "\n")
    return int(wrong != 0)


if __name__ == "__main__":
    sys.exit(main())
