"""The invariants, broken on purpose. Run by ``make mutants``.

The text to change must occur exactly once in its file, so that a mutation cannot silently miss.
"""

from __future__ import annotations

from support.mutations import (
    of_autograd,
    of_bells,
    of_data,
    of_peers,
    of_recovery,
    of_streams,
    of_waits,
    of_wire,
)
from support.mutations.mutation import Edit, Mutation

__all__ = ["MUTATIONS", "TEST_FILES", "Edit", "Mutation"]

_MODULES = (of_data, of_waits, of_recovery, of_peers, of_autograd, of_streams, of_bells, of_wire)
TEST_FILES = tuple(module.TESTS for module in _MODULES)
MUTATIONS = tuple(
    sorted(
        (mutation for module in _MODULES for mutation in module.MUTATIONS),
        # What changes a header builds everything anew, and the next one again: they come last, and
        # at the very end those that build nothing.
        key=lambda mutation: (mutation.in_header, not mutation.native, mutation.invariant),
    )
)
