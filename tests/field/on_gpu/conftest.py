"""The pairs of processes of tests/gpu."""

from __future__ import annotations

from gpu.conftest import _no_child_left, environment, pair, pairs, producer

__all__ = ["_no_child_left", "environment", "pair", "pairs", "producer"]
