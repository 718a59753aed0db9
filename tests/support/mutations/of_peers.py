"""I8: a peer's bytes are checked before use."""

from __future__ import annotations

from support.mutations.mutation import mutation

TESTS = "tests/integration/test_invariants_peers.py"

MUTATIONS = (
    mutation(
        "announce-unchecked",
        "I8",
        f"{TESTS}::test_i8_an_announce_is_checked_before_it_sizes_a_view",
        "native/mailbox_announce.cpp",
        "  return facts;\n}\n\nVerdict MailboxCore::bad_announce(",
        "  facts.fits = true;\n  return facts;\n}\n\nVerdict MailboxCore::bad_announce(",
    ),
    mutation(
        "handshake-length-believed",
        "I8",
        f"{TESTS}::test_i8_a_hostile_handshake_harms_nobody",
        "tapchannel/wire.py",
        " or length > MAX_BODY:\n",
        ":\n",
    ),
    mutation(
        "fds-kept",
        "I8",
        f"{TESTS}::test_i8_descriptors_that_a_peer_sends_are_closed",
        "tapchannel/handshake.py",
        "        for fd in fds:\n            os.close(fd)\n        return fields\n",
        "        return fields\n",
    ),
    mutation(
        "offer-size-believed",
        "I8",
        f"{TESTS}::test_i8_the_sizes_of_an_offer_must_fit_together",
        "tapchannel/descriptor.py",
        'fields.integer("arena_bytes", depth * slot_bytes, MAX_BYTES)',
        'fields.integer("arena_bytes", 1, MAX_BYTES)',
    ),
    mutation(
        "poison-is-data",
        "I8",
        f"{TESTS}::test_i8_a_stamp_that_is_none_is_not_data",
        "native/control_block.hpp",
        "  return landed(word, stamp) && (word & kPoison) == 0;\n",
        "  return landed(word, stamp);\n",
    ),
    mutation(
        "seals-unchecked",
        "I8",
        f"{TESTS}::test_i8_offered_memory_must_have_its_size_and_its_seals",
        "native/mapping.hpp",
        "    if (seals < 0 || (seals & (F_SEAL_SHRINK | F_SEAL_GROW)) != "
        "(F_SEAL_SHRINK | F_SEAL_GROW))\n",
        "    if (seals < 0)\n",
    ),
    mutation(
        "block-header-believed",
        "I8",
        f"{TESTS}::test_i8_an_outbox_takes_no_block_of_another_shape",
        "native/block.hpp",
        "header->version != kLayoutVersion || header->lane != lane ||",
        "header->version != kLayoutVersion ||",
    ),
)
