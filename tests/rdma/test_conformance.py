"""The conformance suite, over rc between two RDMA devices: what data and credit it has to carry.

Left out is what only the clock decides: waits of a tenth of a second mean little on an emulated
processor.
"""

from __future__ import annotations

import pytest

from conformance.test_closing import *  # noqa: F403
from conformance.test_credit import *  # noqa: F403
from conformance.test_data import *  # noqa: F403
from conformance.test_drops import *  # noqa: F403
from conformance.test_leases import *  # noqa: F403
from conformance.test_passes import *  # noqa: F403
from conformance.test_sources import *  # noqa: F403

pytestmark = pytest.mark.rdma
