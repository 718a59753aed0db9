"""What the package promises to its users by name."""

from __future__ import annotations

import importlib.metadata
import inspect
from importlib.resources import files

import tapchannel
from tapchannel import errors

ERRORS = {
    "AttachError",
    "AttachTimeout",
    "ChannelClosed",
    "ChecksumError",
    "ConfigError",
    "CreditTimeout",
    "DeviceError",
    "EpochMismatchError",
    "OverrunError",
    "PassAborted",
    "PeerLostError",
    "PlanMismatchError",
    "ProtocolError",
    "StaleStampError",
    "StampTimeout",
    "TapChannelError",
    "TapTimeout",
    "TransportUnavailable",
    "UsageError",
    "WouldBlock",
}
NAMES = {"Key", "Lease", "Mailbox", "Outbox", "Shard", "TapInfo", "TapPlan", "__version__"}


def test_all_is_pinned() -> None:
    """Catches a public name that comes or goes without anybody deciding it."""
    assert len(tapchannel.__all__) == len(set(tapchannel.__all__))
    assert set(tapchannel.__all__) == NAMES | ERRORS


def test_every_public_name_is_there_and_documented() -> None:
    """Catches a name in __all__ that cannot be imported, or says nothing in help()."""
    for name in NAMES - {"__version__"} | ERRORS:
        assert inspect.getdoc(getattr(tapchannel, name)), name


def test_every_error_class_is_public() -> None:
    """Catches an error that users can meet but not catch by name."""
    classes = inspect.getmembers(errors, inspect.isclass)
    own = {name for name, value in classes if issubclass(value, errors.TapChannelError)}
    assert own == ERRORS


def test_version_is_the_installed_one() -> None:
    """Catches a version that is written in two places and differs."""
    assert tapchannel.__version__ == importlib.metadata.version("tapchannel")


def test_types_are_shipped() -> None:
    """Catches a package whose annotations, or those of its native module, type checkers ignore."""
    assert files(tapchannel).joinpath("py.typed").is_file()
    assert files(tapchannel).joinpath("_native.pyi").is_file()
