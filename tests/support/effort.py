"""How long randomised tests search.

``TAPCHANNEL_EFFORT=20 make test ARGS=tests/integration/test_state_machine.py``
"""

from __future__ import annotations

import os

EFFORT = int(os.environ.get("TAPCHANNEL_EFFORT", "1"))


def repeated(times: int) -> int:
    """Give the number of rounds or examples for this run, of which ``times`` is the usual one."""
    return times * EFFORT
