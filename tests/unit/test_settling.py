"""How the ranks of an opening hear of each other."""

from __future__ import annotations

import pytest
from torch.distributed import HashStore

from tapchannel.errors import AttachError, AttachTimeout, ConfigError
from tapchannel.integrations.settling import Settlement


def settlement(store: HashStore, rank: int, limit: float = 5.0, token: str = "a") -> Settlement:
    """Give a rank's, of ranks 0 and 3."""
    return Settlement(store, token, rank, [0, 3], limit)


def test_all_well_phase_by_phase() -> None:
    """Catches: an earlier phase's word that is taken for this one's."""
    store = HashStore()
    first, other = settlement(store, 0), settlement(store, 3, limit=0.0)
    with pytest.raises(AttachTimeout, match="nothing from rank 0"):
        other.settle(None)  # its own word is there now
    first.settle(None)
    with pytest.raises(AttachTimeout, match="nothing from rank 0"):
        other.settle(None)


def test_problem_is_raised_here_and_told_there() -> None:
    """Catches: a rank that goes on, or waits, where another could not open its part."""
    store = HashStore()
    with pytest.raises(ConfigError, match="no room"):
        settlement(store, 3).settle(ConfigError("no room"))
    with pytest.raises(AttachError, match="rank 3: ConfigError: no room"):
        settlement(store, 0).settle(None)


def test_another_opening_is_not_heard() -> None:
    """Catches: the words of an earlier session of this job."""
    store = HashStore()
    settlement(store, 3, limit=0.0)._store.set("tapchannel/settle/a/1/3", "well")
    with pytest.raises(AttachTimeout, match="look for that rank's own error"):
        settlement(store, 0, limit=0.0, token="b").settle(None)
