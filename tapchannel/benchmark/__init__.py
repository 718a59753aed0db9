"""``tapchannel bench``: what a tap costs here, beside the other ways to move the same bytes.

`scenarios` say what is measured, `peers` move the bytes, `team` runs a peer's processes and
`rounds` is what those do. `frame` takes turns between the teams and checks what arrives.
"""

from .command import main

__all__ = ["main"]
