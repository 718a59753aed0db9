"""I3, I5 and I6: every wait ends, a push waits for nothing, nothing deadlocks."""

from __future__ import annotations

from support.mutations.mutation import mutation

TESTS = "tests/integration/test_invariants_waits.py"

MUTATIONS = (
    mutation(
        "endless-recv",
        "I3",
        (
            f"{TESTS}::test_i3_a_wait_for_a_stamp_ends",
            f"{TESTS}::test_i3_a_wait_for_a_slot_ends",
        ),
        "native/mailbox_wait.cpp",
        "    if (over) return late(want, patience);\n",
        "",
    ),
    mutation(
        "endless-queue",
        "I3",
        f"{TESTS}::test_i3_a_queued_push_does_not_wait_for_ever",
        "native/outbox_progress.cpp",
        "  if (!queue_wait_.over() || credit_covers(key)) return;\n",
        "  return;\n",
    ),
    mutation(
        "endless-flush",
        "I3",
        f"{TESTS}::test_i3_a_flush_ends",
        "native/outbox.cpp",
        "    if (patience.over()) break;\n",
        "",
    ),
    mutation(
        "death-unnoticed",
        "I3",
        f"{TESTS}::test_i3_a_wait_for_a_dead_producer_ends",
        "native/mailbox_lanes.cpp",
        "!socket_ended(lane.socket) && !readable(lane.pidfd, POLLIN)",
        "true",
    ),
    mutation(
        "nameless-lane",
        "I3",
        f"{TESTS}::test_i3_a_wait_for_a_stamp_ends",
        "tapchannel/verdicts.py",
        "    if facts is not None:\n",
        "    if facts is not None and verdict.fault not in _WAITS:\n",
    ),
    mutation(
        "endless-wait-ready",
        "I3",
        f"{TESTS}::test_i3_waiting_for_producers_ends",
        "tapchannel/readiness.py",
        "        if waited >= limit:\n",
        "        if waited >= limit + 3600:\n",
    ),
    mutation(
        "endless-attach",
        "I3",
        f"{TESTS}::test_i3_attaching_ends",
        "tapchannel/attach.py",
        "        if waited >= limit:\n",
        "        if waited >= limit + 3600:\n",
    ),
    mutation(
        "push-waits-for-credit",
        "I5",
        f"{TESTS}::test_i5_a_push_waits_for_no_credit",
        "native/outbox_push.cpp",
        "  bool credit = !dropped && credit_covers(key);\n",
        "  for (int ms = 0; ms < 15000 && !credit_covers(key); ++ms) sleep_ns(1000000);\n"
        "  bool credit = !dropped && credit_covers(key);\n",
    ),
    mutation(
        "push-flushes",
        "I5",
        f"{TESTS}::test_i5_a_push_waits_for_no_credit",
        "tapchannel/outbox.py",
        '            raise self._error(verdict, f"push({microbatch}, {tap!r})")\n',
        '            raise self._error(verdict, f"push({microbatch}, {tap!r})")\n'
        "        self.flush()\n",
    ),
    mutation(
        "push-synchronises",
        "I5",
        f"{TESTS}::test_i5_a_push_does_not_wait_for_the_stream_nor_hold_it_up",
        "native/cuda_events.cpp",
        '  check(recorded, "cuEventRecord");\n  return event;\n',
        '  check(recorded, "cuEventRecord");\n'
        '  check(driver()->cuEventSynchronize(event), "cuEventSynchronize");\n  return event;\n',
        needs=("gpu",),
    ),
    mutation(
        "stream-waits-for-itself",
        "I6",
        f"{TESTS}::test_i6_a_stream_is_not_made_to_wait_for_its_own_release",
        "native/mailbox_wait.cpp",
        "        if (request.mode == WaitMode::stream && !hard.empty()) return want;\n",
        "",
    ),
    mutation(
        "wait-before-own-push",
        "I6",
        f"{TESTS}::test_i6_both_roles_in_one_process_do_not_block_each_other",
        "native/mailbox_unmet.cpp",
        "request.need_announces || lane.same_process || stamps;",
        "request.need_announces || stamps;",
        needs=("gpu",),
    ),
    mutation(
        "kernel-launched",
        "I5",
        f"{TESTS}::test_i5_no_kernel_of_ours_can_be_launched",
        "native/cuda_driver.hpp",
        "  X(cuMemsetD2D8Async, 3020,",
        "  X(cuLaunchKernel, 4000, void* function, CUstream stream) X(cuMemsetD2D8Async, 3020,",
    ),
)
