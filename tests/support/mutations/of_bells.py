"""I3 where somebody sleeps on a bell: a wait ends when what it waits for comes."""

from __future__ import annotations

from support.mutations.mutation import mutation

TESTS = "tests/bells/test_bells.py"

MUTATIONS = (
    mutation(
        "last-look-left-out",
        "I3",
        f"{TESTS}::test_what_came_before_is_not_slept_on",
        "native/block.hpp",
        "  if (!ready()) {\n",
        "  {\n",
    ),
    mutation(
        "count-read-after-the-look",
        "I3",
        f"{TESTS}::test_what_comes_after_the_look_is_not_slept_on",
        "native/block.hpp",
        "  uint32_t seen = bell.count.load(std::memory_order_seq_cst);\n  if (!ready()) {\n",
        "  if (!ready()) {\n    uint32_t seen = bell.count.load(std::memory_order_seq_cst);\n",
    ),
    mutation(
        "sleeper-unannounced",
        "I3",
        f"{TESTS}::test_a_ring_wakes_who_sleeps",
        "native/block.hpp",
        "  bell.sleepers.fetch_add(1, std::memory_order_seq_cst);\n",
        "  bell.sleepers.fetch_add(0, std::memory_order_seq_cst);\n",
    ),
    mutation(
        "asleep-at-once",
        "I3",
        f"{TESTS}::test_what_comes_soon_is_met_awake",
        "native/block.hpp",
        "  if (awake_ns != 0 && met_awake(std::min(ns, awake_ns), ready)) return;\n",
        "  if (awake_ns != 0 && met_awake(std::min<uint64_t>(0, awake_ns), ready)) return;\n",
    ),
    mutation(
        "awake-past-the-limit",
        "I3",
        f"{TESTS}::test_awake_time_ends",
        "native/block.hpp",
        "  if (awake_ns != 0 && met_awake(std::min(ns, awake_ns), ready)) return;\n",
        "  if (awake_ns != 0 && met_awake(std::max(ns, awake_ns), ready)) return;\n",
    ),
    mutation(
        "bells-counted-late",
        "I3",
        f"{TESTS}::test_several_bells_miss_no_ring",
        "native/bells.hpp",
        "    uint64_t until = now_ns() + ns;\n",
        "    uint64_t until = now_ns() + ns;\n"
        "    for (size_t i = 0; i < bells_.size(); ++i)\n"
        "      waited_[i].value = bells_[i]->count.load();\n",
    ),
    mutation(
        "bells-unannounced",
        "I3",
        f"{TESTS}::test_any_of_several_bells_wakes",
        "native/bells.hpp",
        "    for (Bell* bell : bells_) bell->sleepers.fetch_add(1, std::memory_order_seq_cst);\n",
        "    bells_[0]->sleepers.fetch_add(1, std::memory_order_seq_cst);\n",
    ),
)
