"""Stamp arithmetic: one word for (epoch, pass, microbatch), compared as the GPU compares."""

from __future__ import annotations

import ctypes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapchannel.errors import ConfigError
from tapchannel.keys import (
    MAX_EPOCH,
    MAX_MICROBATCHES,
    MAX_STEP,
    POISON_BIT,
    Key,
    describe,
    is_poisoned,
    landed,
    poison,
)


def around(low: int, high: int) -> st.SearchStrategy[int]:
    """Draw from a range, its ends more often than chance would."""
    return st.one_of(st.sampled_from([low, low + 1, high - 1, high]), st.integers(low, high))


keys = st.builds(
    Key,
    epoch=around(1, MAX_EPOCH),
    step=around(0, MAX_STEP),
    microbatch=around(0, MAX_MICROBATCHES - 1),
)
words = around(0, (1 << 64) - 1)


@given(keys)
def test_stamp_gives_its_key_back(key: Key) -> None:
    """Bug: fields that overlap, or a shift that is off by one bit."""
    assert Key.from_stamp(key.stamp()) == key


@given(keys, keys)
def test_stamps_sort_as_keys_do(one: Key, other: Key) -> None:
    """Bug: fields in an order in which a later pass has a smaller stamp than an earlier one."""
    assert (one.stamp() < other.stamp()) == (one < other)


@given(keys, keys)
def test_a_word_has_landed_once_it_reached_the_key(seen: Key, awaited: Key) -> None:
    """Bug: equality for GEQ (a wait that never ends), or > (data taken one key early)."""
    assert landed(seen.stamp(), awaited.stamp()) == (seen >= awaited)


@given(words, words)
def test_landed_is_the_gpus_compare(word: int, stamp: int) -> None:
    """Bug: host and GPU differ about a word, so that one waits for what the other has taken."""
    assert landed(word, stamp) == (ctypes.c_int64(word - stamp).value >= 0)


@given(words)
def test_half_the_range_apart_has_not_landed(stamp: int) -> None:
    """Bug: a compare that is off by one where the signed difference turns negative."""
    assert landed((stamp + (1 << 63) - 1) % (1 << 64), stamp)
    assert not landed((stamp + (1 << 63)) % (1 << 64), stamp)


@given(keys)
def test_nothing_has_landed_in_a_fresh_block(key: Key) -> None:
    """Bug: the first microbatch of the first pass has stamp 0, which a zeroed word satisfies."""
    assert not landed(0, key.stamp())


@given(keys)
def test_top_bit_and_poison_bit_are_never_a_keys(key: Key) -> None:
    """Bug: an epoch so wide that it sets the poison bit, or the sign bit of the compare."""
    assert key.stamp() < POISON_BIT
    assert not is_poisoned(key.stamp())


def test_the_fields_fill_the_word_exactly() -> None:
    """Bug: a layout other than the one that native code and the peer assume."""
    highest = Key(MAX_EPOCH, MAX_STEP, MAX_MICROBATCHES - 1).stamp()
    assert highest == POISON_BIT - 1
    assert Key(1, 0, 0).stamp() == (1 << 46) + 1
    assert Key(1, 1, 0).stamp() - Key(1, 0, 0).stamp() == 1 << 18
    assert POISON_BIT == 1 << 62


@given(keys, keys)
def test_poison_ends_every_wait(poisoned: Key, awaited: Key) -> None:
    """Bug: a stream that waits for a later key stays stuck behind an older poison."""
    word = poison(poisoned.stamp())
    assert is_poisoned(word)
    assert landed(word, awaited.stamp())


@given(keys)
def test_poison_names_its_key_and_is_poison_once(key: Key) -> None:
    """Bug: poison that is added, not set, so that poisoning twice clears it or moves the key."""
    word = poison(key.stamp())
    assert poison(word) == word
    assert Key.from_stamp(word) == key


@given(keys, keys)
def test_a_stamp_never_passes_for_landed_at_poison(seen: Key, poisoned: Key) -> None:
    """Bug: a normal stamp that compares as having reached a poisoned one."""
    assert not landed(seen.stamp(), poison(poisoned.stamp()))


@pytest.mark.parametrize(
    "fields",
    [
        (0, 0, 0),
        (MAX_EPOCH + 1, 0, 0),
        (-1, 0, 0),
        (1, -1, 0),
        (1, MAX_STEP + 1, 0),
        (1, 0, -1),
        (1, 0, MAX_MICROBATCHES),
        (1, 0, 10**5000),
        (1, 2.0, 0),
        (1, True, 0),
        ("1", 0, 0),
        (1, None, 0),
    ],
    ids=lambda fields: "-".join(
        str(field)[:9] if field != 10**5000 else "huge" for field in fields
    ),
)
def test_a_field_that_does_not_fit_is_refused(fields: tuple[int, int, int]) -> None:
    """Bug: a pass number that spills into the epoch; an error that cannot even be printed."""
    with pytest.raises(ConfigError) as refusal:
        Key(*fields)
    assert str(refusal.value)
    assert refusal.value.seen is not None
    assert refusal.value.expected is not None


@pytest.mark.parametrize("word", [0, 1, 1 << 18, 1 << 46, POISON_BIT])
def test_a_word_that_is_no_keys_stamp_gives_no_key(word: int) -> None:
    """Bug: a word without epoch or microbatch that is read as some key, perhaps microbatch -1."""
    with pytest.raises(ConfigError, match="no key's stamp"):
        Key.from_stamp(word)


@pytest.mark.parametrize("word", [-1, 1 << 63, (1 << 64) - 1, 1 << 64])
def test_a_word_beyond_63_bits_is_refused(word: int) -> None:
    """Bug: a key read from a damaged word; a poisoned word whose sign bit makes it end no wait."""
    for use in (Key.from_stamp, poison):
        with pytest.raises(ConfigError, match="out of range"):
            use(word)


@pytest.mark.parametrize(
    ("word", "text"),
    [
        (0, "nothing yet"),
        (Key(1, 3, 2).stamp(), "pass 3, microbatch 2 (epoch 1)"),
        (poison(Key(1, 3, 2).stamp()), "poisoned at pass 3, microbatch 2 (epoch 1)"),
        (poison(0), "poisoned at nothing yet"),
        ((7 << 46) + (3 << 18), "pass 3, no microbatch (epoch 7)"),
        (1 << 63, "a word that is no stamp"),
    ],
)
def test_describe_says_what_a_word_means(word: int, text: str) -> None:
    """Bug: a message that prints a word as a number, or names the microbatch one too high."""
    assert describe(word) == text


@given(st.integers())
def test_describe_never_raises(word: int) -> None:
    """Bug: an error path that fails while it describes a damaged word."""
    assert describe(word)


@given(keys)
def test_a_key_cannot_be_changed(key: Key) -> None:
    """Bug: a key used as a dictionary's key or in an error, then changed under it."""
    with pytest.raises(AttributeError):
        key.step = 0  # pyright: ignore[reportAttributeAccessIssue]
    assert hash(key) == hash(Key(key.epoch, key.step, key.microbatch))
