"""I1 to I3 where a consumer's stream waits: poison, and credit of passes that were closed."""

from __future__ import annotations

from support.mutations.mutation import mutation

TESTS = "tests/streams/test_streams.py"

MUTATIONS = (
    mutation(
        "poison-under-a-reader",
        "I2",
        (
            f"{TESTS}::test_poison_reaches_no_older_read",
            f"{TESTS}::test_poison_lets_no_older_wait_through",
        ),
        "native/mailbox_lease.cpp",
        "    return entry.first < id && entry.second.slot == record.slot;\n",
        "    return entry.first < id && entry.second.slot == record.slot + depth_;\n",
    ),
    mutation(
        "poison-once",
        "I3",
        f"{TESTS}::test_poison_sticks",
        "native/mailbox_monitor.cpp",
        "    if (record.poisoned && !performed) poison_words(record);\n",
        "",
    ),
    mutation(
        "ahead-of-poison",
        "I1",
        f"{TESTS}::test_nothing_is_enqueued_ahead_of_poison",
        "native/mailbox_wait.cpp",
        "    if (record.slot == slot && (record.doomed || record.poisoned)) return true;\n",
        "    if (record.slot > depth_) return true;\n",
    ),
    mutation(
        "close-forgets-the-pass-before",
        "I3",
        f"{TESTS}::test_closing_waits_for_the_pass_before",
        "native/mailbox_wait.cpp",
        "    Verdict older = older_unmet();\n",
        "    Verdict older;\n",
    ),
    mutation(
        "late-lane-owed-nothing",
        "I3",
        f"{TESTS}::test_late_lane_keeps_the_closed_pass",
        "native/mailbox_lanes.cpp",
        "  if (lane.ever) lane.block.consumer().completed",
        "  lane.block.consumer().completed",
    ),
    mutation(
        "restart-hides-a-loss",
        "I3",
        f"{TESTS}::test_restart_does_not_hide_a_loss",
        "native/mailbox_lanes.cpp",
        "  if (lane.ever) fail_waits(index);\n",
        "",
    ),
)
