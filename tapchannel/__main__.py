"""``python -m tapchannel``: the same as the ``tapchannel`` command."""

from __future__ import annotations

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
