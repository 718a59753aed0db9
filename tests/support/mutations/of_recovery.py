"""I7: an exception in the middle of a pass leaves the channel usable."""

from __future__ import annotations

from support.mutations.mutation import mutation

TESTS = "tests/integration/test_invariants_recovery.py"

MUTATIONS = (
    mutation(
        "abort-keeps-fault",
        "I7",
        f"{TESTS}::test_i7_the_pass_after_an_exception_works",
        "native/mailbox.cpp",
        "  if (open_ || failure_) end_pass(reason);\n  failure_ = {};\n",
        "  if (open_ || failure_) end_pass(reason);\n",
    ),
    mutation(
        "abort-unheard",
        "I7",
        f"{TESTS}::test_i7_an_exception_on_one_side_is_heard_on_the_others",
        "native/outbox_pass.cpp",
        "  words.aborted[aborts_++ % kAbortsKept].value.store(",
        "  Word{}.value.store(",
    ),
    mutation(
        "queue-survives",
        "I7",
        f"{TESTS}::test_i7_nothing_stays_queued_of_a_dead_pass",
        "native/outbox_progress.cpp",
        "  if (std::any_of(queue_.begin(), queue_.end(), dead)) {\n",
        "  if (queue_.empty() && dead(queue_.front())) {\n",
    ),
    mutation(
        "exception-keeps-pass",
        "I7",
        f"{TESTS}::test_i7_the_pass_after_an_exception_works",
        "tapchannel/passes.py",
        "            self._abort(said(error))\n",
        "            said(error)\n",
    ),
)
