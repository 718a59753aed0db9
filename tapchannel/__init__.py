"""One-way channel for hidden states, from pipeline stages into the draft stage's own memory.

>>> import tapchannel
>>> plan = tapchannel.TapPlan(groups={"features": ["layer1", "layer2"]}, width=64, dtype="float32",
...                           max_rows=32)
"""

from __future__ import annotations

from .arrivals import TapInfo
from .errors import (
    AttachError,
    AttachTimeout,
    ChannelClosed,
    ChecksumError,
    ConfigError,
    CreditTimeout,
    DeviceError,
    EpochMismatchError,
    OverrunError,
    PassAborted,
    PeerLostError,
    PlanMismatchError,
    ProtocolError,
    StaleStampError,
    StampTimeout,
    TapChannelError,
    TapTimeout,
    TransportUnavailable,
    UsageError,
    WouldBlock,
)
from .keys import Key
from .layout_check import check_layout
from .lease import Lease
from .mailbox import Mailbox
from .outbox import Outbox
from .plan import Shard, TapPlan

__version__ = "0.1.0"

__all__ = [
    "AttachError",
    "AttachTimeout",
    "ChannelClosed",
    "ChecksumError",
    "ConfigError",
    "CreditTimeout",
    "DeviceError",
    "EpochMismatchError",
    "Key",
    "Lease",
    "Mailbox",
    "OverrunError",
    "Outbox",
    "PassAborted",
    "PeerLostError",
    "PlanMismatchError",
    "ProtocolError",
    "Shard",
    "StaleStampError",
    "StampTimeout",
    "TapChannelError",
    "TapInfo",
    "TapPlan",
    "TapTimeout",
    "TransportUnavailable",
    "UsageError",
    "WouldBlock",
    "__version__",
]

check_layout()
