"""What the tests of the invariants share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.channels import SHM, Maker
from support.places import Here


@pytest.fixture
def channel_of(tmp_path: Path) -> Iterator[Maker]:
    """Make channels in host memory."""
    with Maker(SHM, Here(), tmp_path) as maker:
        yield maker
