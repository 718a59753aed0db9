"""Runs a script that uses Megatron-Core as it is, on this machine's CPU: ``… SCRIPT``."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.megatron_shim import import_megatron, on_this_device

import_megatron()
with on_this_device():
    runpy.run_path(sys.argv[1], run_name="__main__")
