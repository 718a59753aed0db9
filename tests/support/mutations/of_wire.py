"""I1 where a stamp stands behind its payload only because our own end of the wire waits for it."""

from __future__ import annotations

from support.mutations.mutation import mutation

TESTS = "tests/conformance/test_sources.py"

MUTATIONS = (
    mutation(
        "flush-is-enough",
        "I1",
        f"{TESTS}::test_source_layout",
        "native/ucx_endpoint.cpp",
        "    if (!under_way_.empty() && *under_way_.begin() <= flushed_.front()->behind) break;\n",
        "",
        needs=("gpu", "ucx"),
    ),
)
