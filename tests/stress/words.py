"""What the taps of a stress hold: every word tells its key, its tap, its leg and its place.

A word is the key's stamp times an odd number, plus what the tap and the place add, modulo 2^64. The
product can be taken back, so that a wrong word says which key it was pushed for.
"""

from __future__ import annotations

import torch

from stress.course import Leg
from tapchannel import Key
from tapchannel.keys import POISON_BIT, describe

ODD = 0x9E3779B97F4A7C15
BACK = pow(ODD, -1, 1 << 64)
SHOWN = 4  # keys that a complaint names


def signed(word: int) -> int:
    """Give the int64 with the same 64 bits."""
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >> 63 else word


class Words:
    """The contents of all taps of one leg."""

    def __init__(self, leg: Leg) -> None:
        self._leg = leg
        self._taps: dict[str, torch.Tensor] = {}
        self._groups: dict[str, torch.Tensor] = {}
        for group, taps in leg.groups.items():
            blank = torch.cat([self._blank(tap) for tap in taps], 1)
            self._groups[group] = blank
            parts = blank.split([leg.widths[tap] for tap in taps], 1)
            self._taps |= {tap: part.contiguous() for tap, part in zip(taps, parts, strict=True)}

    def _blank(self, tap: str) -> torch.Tensor:
        """Give what a tap holds for the stamp 0."""
        rows, width = self._leg.size.rows, self._leg.widths[tap]
        salt = signed(self._leg.chance("salt", tap).getrandbits(64))
        return torch.arange(rows * width).view(rows, width) + salt

    def of_tap(self, tap: str, key: Key, rows: int) -> torch.Tensor:
        """Give what is pushed."""
        return self._taps[tap][:rows] + signed(key.stamp() * ODD)

    def of_group(self, group: str, key: Key, rows: int) -> torch.Tensor:
        """Give what a lease must show."""
        return self._groups[group][:rows] + signed(key.stamp() * ODD)

    def complaint(self, group: str, key: Key, rows: int, seen: torch.Tensor) -> str:
        """Say what is wrong with what a lease shows."""
        where = f"{self._leg}: {group} of {key} (epoch {key.epoch})"
        if seen.shape != (rows, self._groups[group].shape[1]):
            return f"{where}: {list(seen.shape)} for {rows} rows"
        words = ((seen - self._groups[group][:rows]) * signed(BACK)).unique().tolist()
        told = [describe(word) if 0 < word < POISON_BIT else "no key" for word in words[:SHOWN]]
        return f"{where}: words of {len(words)} keys: {'; '.join(told)}"
