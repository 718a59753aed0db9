"""Processes for the field reports: the workers of tests/multiprocess."""

from __future__ import annotations

from multiprocess.conftest import crew, mailbox_of, steady, store

__all__ = ["crew", "mailbox_of", "steady", "store"]
