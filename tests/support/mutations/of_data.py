"""I1, I2 and I4: what a lease may show, when its slot may be written, what a failure leaves."""

from __future__ import annotations

from support.mutations.mutation import Edit, Mutation, mutation

TESTS = "tests/integration/test_invariants_data.py"

MUTATIONS = (
    Mutation(
        "stamp-before-payload",
        "I1",
        (f"{TESTS}::test_i1_no_stamp_stands_before_its_payload",),
        (
            Edit(
                "native/outbox_progress.cpp",
                "  transport_->stamp({block_.stamp(slot, push.cell), pending.key, "
                "block_.announce(slot, push.cell)},\n                    place);\n",
                "",
            ),
            Edit(
                "native/outbox_progress.cpp",
                "  if (pending.dropped)\n    transport_->put_poison(",
                "  transport_->stamp({block_.stamp(slot, push.cell), pending.key, "
                "block_.announce(slot, push.cell)},\n                    place);\n"
                "  if (pending.dropped)\n    transport_->put_poison(",
            ),
        ),
    ),
    Mutation(
        "older-stamp-accepted",
        "I1",
        (f"{TESTS}::test_i1_an_older_microbatch_does_not_pass_for_the_one_awaited",),
        (
            Edit(
                "native/mailbox_unmet.cpp",
                "bool here = reached(seen, key);",
                "bool here = pass_of(seen) == pass_of(key);",
            ),
            Edit(
                "native/mailbox_unmet.cpp",
                "if (here && seen != key) {",
                "if (here) said = key;\n    if (reached(seen, key) && seen != key) {",
            ),
        ),
    ),
    mutation(
        "overrun-accepted",
        "I1",
        f"{TESTS}::test_i1_a_newer_microbatch_does_not_pass_for_the_one_awaited",
        "native/mailbox_unmet.cpp",
        "if (here && seen != key) {",
        "if (false) {",
    ),
    mutation(
        "late-write-unseen",
        "I1",
        f"{TESTS}::test_i1_a_late_write_under_an_open_lease_is_noticed",
        "native/mailbox_lease.cpp",
        "  record.failure = overwritten(record);\n",
        "",
    ),
    mutation(
        "named-rows-trusted",
        "I1",
        f"{TESTS}::test_i1_named_rows_show_no_row_that_was_not_pushed",
        "native/mailbox_announce.cpp",
        "  if (rows < 0) return {};\n",
        "  if (rows < 1 << 30) return {};\n",
    ),
    mutation(
        "reset-keeps-epoch",
        "I1",
        f"{TESTS}::test_i1_an_earlier_life_does_not_pass_for_this_one",
        "native/mailbox.cpp",
        "  ++epoch_;\n",
        "",
    ),
    mutation(
        "credit-under-lease",
        "I2",
        f"{TESTS}::test_i2_a_leased_slot_is_not_written",
        "native/mailbox.cpp",
        "      bool older = record.pass != pass() || record.microbatch < next;\n",
        "      bool older = false;\n",
    ),
    mutation(
        "credit-over-passes",
        "I2",
        f"{TESTS}::test_i2_nor_by_the_next_pass",
        "native/mailbox.cpp",
        "      bool older = record.pass != pass() || record.microbatch < next;\n",
        "      bool older = record.pass == pass() && record.microbatch < next;\n",
    ),
    mutation(
        "unread-granted",
        "I2",
        f"{TESTS}::test_i2_nor_before_its_microbatch_was_received",
        "native/mailbox.cpp",
        "received_[next - depth_] == Received::no)",
        "received_[next - depth_] == Received::no && false)",
    ),
    mutation(
        "credit-before-queued-reads",
        "I2",
        f"{TESTS}::test_i2_a_slot_whose_reads_are_queued_is_not_written",
        "native/cuda_port.cpp",
        "    return Given::enqueued;\n",
        "    return Given::performed;\n",
        needs=("gpu",),
    ),
    mutation(
        "failure-forgotten",
        "I4",
        f"{TESTS}::test_i4_a_failed_wait_is_not_mended_by_what_comes_late",
        "native/mailbox_wait.cpp",
        "      if (!failure_) failure_ = verdict;\n",
        "",
    ),
    mutation(
        "drop-leaves-old-bytes",
        "I4",
        f"{TESTS}::test_i4_a_dropped_tap_is_poison_and_not_the_microbatch_before",
        "native/outbox_progress.cpp",
        "    transport_->put_poison(place, push.source.rows, cell);\n",
        "    transport_->put_poison(place, 0, cell);\n",
    ),
    mutation(
        "no-poison-pattern",
        "I4",
        f"{TESTS}::test_i4_a_stream_that_is_let_go_sees_nan_and_its_lease_raises",
        "native/mailbox_lease.cpp",
        "  record.fill = port_->start_fill(std::move(regions));\n",
        "  record.fill = port_->start_fill({});\n",
        needs=("gpu",),
    ),
    mutation(
        "failed-lease-silent",
        "I4",
        f"{TESTS}::test_i4_a_stream_that_is_let_go_sees_nan_and_its_lease_raises",
        "native/mailbox_lease.cpp",
        "  if (record.failure || record.waiting) return record.failure;\n",
        "  return {};\n",
        needs=("gpu",),
    ),
)
