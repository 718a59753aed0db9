"""Stamp arithmetic: (epoch, pass, microbatch) as one 64-bit word that only grows. Pure.

::

    bit 63    bit 62    61 … 46    45 … 18          17 … 0
    0         poison    epoch      pass (step)      microbatch + 1

Bit 63 stays 0 because the GPU's GEQ is a cyclic signed compare: two words less than 2^63 apart
always compare as they should. The fields stand in the order of `Key`, so stamps and keys sort
alike. Epochs begin at 1 and the microbatch is stored plus one, so the word 0 is no key's stamp
and means that nothing ever landed. Poison stands above the epoch: a poisoned word has reached
every stamp there is, so every wait on it ends, and it must be cleared before the next epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from .errors import ConfigError

_MICROBATCH_BITS: Final = 18
_STEP_BITS: Final = 28
_EPOCH_BITS: Final = 16
_STEP_SHIFT: Final = _MICROBATCH_BITS
_EPOCH_SHIFT: Final = _MICROBATCH_BITS + _STEP_BITS
_WORD_MASK: Final = (1 << 64) - 1
_SIGN_BIT: Final = 1 << 63

MAX_EPOCH: Final = (1 << _EPOCH_BITS) - 1
MAX_STEP: Final = (1 << _STEP_BITS) - 1
MAX_MICROBATCHES: Final = (1 << _MICROBATCH_BITS) - 1
POISON_BIT: Final = 1 << (_EPOCH_SHIFT + _EPOCH_BITS)


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """Name a slot's contents: the microbatch of a pass, in one epoch of a mailbox.

    Raises:
        ConfigError: a field is no integer, or does not fit the stamp.
    """

    epoch: int
    step: int
    microbatch: int

    def __post_init__(self) -> None:
        checked_int("epoch", self.epoch, 1, MAX_EPOCH)
        checked_int("pass", self.step, 0, MAX_STEP)
        checked_int("microbatch", self.microbatch, 0, MAX_MICROBATCHES - 1)

    def __str__(self) -> str:
        return f"pass {self.step}, microbatch {self.microbatch}"

    def stamp(self) -> int:
        """Give the word that a cell holds once this key has landed in it."""
        return self.epoch << _EPOCH_SHIFT | self.step << _STEP_SHIFT | self.microbatch + 1

    @classmethod
    def from_stamp(cls, stamp: int) -> Key:
        """Give the key of a stamp, poisoned or not.

        Raises:
            ConfigError: the word is no key's stamp; 0, "nothing yet", is none either.
        """
        checked_int("stamp", stamp, 0, _SIGN_BIT - 1)
        epoch, step, count = _fields(stamp)
        if epoch == 0 or count == 0:
            raise ConfigError("word is no key's stamp", seen=describe(stamp))
        return cls(epoch, step, count - 1)


def landed(word: int, stamp: int) -> bool:
    """Tell whether a cell's word has reached a stamp, by the compare that the GPU's GEQ does."""
    return (word - stamp) & _WORD_MASK < _SIGN_BIT


def is_poisoned(word: int) -> bool:
    """Tell whether a word says: do not use what it covers."""
    return word & POISON_BIT != 0


def poison(stamp: int) -> int:
    """Mark a stamp as poisoned; every wait on the word then ends.

    Raises:
        ConfigError: the stamp is no 63-bit word.
    """
    checked_int("stamp", stamp, 0, _SIGN_BIT - 1)
    return stamp | POISON_BIT


def describe(word: int) -> str:
    """Say in words what a stamp, or any word found in its place, stands for."""
    if not 0 <= word < _SIGN_BIT:
        return "a word that is no stamp"
    epoch, step, count = _fields(word)
    if word & ~POISON_BIT == 0:
        text = "nothing yet"
    elif count == 0:
        text = f"pass {step}, no microbatch (epoch {epoch})"
    else:
        text = f"pass {step}, microbatch {count - 1} (epoch {epoch})"
    return f"poisoned at {text}" if is_poisoned(word) else text


def _fields(word: int) -> tuple[int, int, int]:
    """Split a word into epoch, pass and microbatch + 1."""
    return word >> _EPOCH_SHIFT & MAX_EPOCH, word >> _STEP_SHIFT & MAX_STEP, word & MAX_MICROBATCHES


def checked_int(name: str, value: object, lowest: int, highest: int) -> int:
    """Give back an integer within its range, both ends included.

    Raises:
        ConfigError: it is out of range, or no integer.
    """
    # To Python a bool is an int; True as a pass number is a slip.
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} is no integer", seen=type(value).__name__, expected="int")
    if not lowest <= value <= highest:
        # Python writes no integer of more than some thousand digits.
        seen = value if value.bit_length() <= 128 else f"an integer of {value.bit_length()} bits"
        raise ConfigError(f"{name} is out of range", seen=seen, expected=f"{lowest} to {highest}")
    return value
