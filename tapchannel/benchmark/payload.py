"""Payload that both ends can work out by themselves, so that every byte of it can be checked.

A source is a window on one long row of words, word ``n`` being ``n`` times an odd number modulo
2**64: no two places of the row are alike, so a word that is stale, shifted or of another tap is a
wrong word. The windows of neighbouring messages begin at different places, and their number is a
prime, so that what a slot held before, whatever the depth, is wrong in every word.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from .traffic import MIB, TapShape, Traffic

_ODD: Final = -7046029254386353131  # 2**64 divided by the golden ratio, as a signed word
WINDOWS: Final = 61
_SHIFT: Final = 5  # windows from one round's first message to the next round's
_PAGE_WORDS: Final = 512
_SPREAD: Final = {"cpu": 64 * MIB, "cuda": 128 * MIB}  # more than a cache holds
_TAP_WORDS: Final = 1 << 40  # from one tap's row to the next one's
_CHUNK_WORDS: Final = 1 << 19


def _words(first: int, count: int, device: torch.device | str) -> torch.Tensor:
    return torch.arange(first, first + count, dtype=torch.int64, device=device).mul_(_ODD)


def _window(step: int, message: int) -> int:
    return (message + _SHIFT * step) % WINDOWS


def _stride(traffic: Traffic) -> int:
    """Give the words between two windows; a whole number of pages."""
    spread = _SPREAD["cuda" if traffic.place.on_gpu else "cpu"] // 8
    largest = max(tap.bytes for tap in traffic.taps) // 8
    wanted = min(largest, spread // WINDOWS)
    return -(-wanted // _PAGE_WORDS) * _PAGE_WORDS + _PAGE_WORDS


def _first_word(traffic: Traffic, tap: TapShape, step: int, message: int) -> int:
    row = (1 + traffic.taps.index(tap)) * _TAP_WORDS
    return row + _window(step, message) * _stride(traffic)


class Sources:
    """The tensors that one producer sends. ``memory`` is what they lie in, one tensor a tap."""

    def __init__(self, traffic: Traffic, rank: int) -> None:
        self._taps = traffic.of(rank)
        stride = _stride(traffic)
        self.memory: dict[str, torch.Tensor] = {}
        self._of: list[dict[str, torch.Tensor]] = [{} for _ in range(WINDOWS)]
        device = traffic.place.producer(rank)
        for tap in self._taps:
            row = (1 + traffic.taps.index(tap)) * _TAP_WORDS
            whole = torch.empty(tap.bytes // 8 + (WINDOWS - 1) * stride, dtype=torch.int64)
            whole = whole.to(device)
            for begin in range(0, whole.numel(), _CHUNK_WORDS):
                part = whole[begin : begin + _CHUNK_WORDS]
                part.copy_(_words(row + begin, part.numel(), device))
            self.memory[tap.name] = whole
            for number, taps in enumerate(self._of):
                part = whole[number * stride : number * stride + tap.bytes // 8]
                taps[tap.name] = part.view(torch.bfloat16).view(tap.rows, tap.width)

    def of(self, step: int, message: int) -> Mapping[str, torch.Tensor]:
        """Give a message's tensors, by tap."""
        return self._of[_window(step, message)]


def wrong_words(
    traffic: Traffic, step: int, message: int, landed: Mapping[str, torch.Tensor], rank: int = -1
) -> int:
    """Count the 64-bit words of a message that are not what was sent for exactly this key.

    ``rank``: look at that producer's taps only.
    """
    wrong = 0
    for tap in traffic.taps if rank < 0 else traffic.of(rank):
        seen = landed[tap.name]
        if tuple(seen.shape) != (tap.rows, tap.width) or seen.dtype != torch.bfloat16:
            wrong += tap.bytes // 8
            continue
        row_words = tap.bytes // 8 // tap.rows
        rows = max(1, _CHUNK_WORDS // row_words)
        first = _first_word(traffic, tap, step, message)
        for begin in range(0, tap.rows, rows):
            part = seen[begin : begin + rows].contiguous().view(torch.int64).view(-1)
            due = _words(first + begin * row_words, part.numel(), part.device)
            wrong += int((part != due).sum().item())
    return wrong
