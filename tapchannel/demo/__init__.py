"""``tapchannel demo``: a pipeline trains on real text, its last stage trains a draft on the taps.

Every tap is compared, bit for bit and in place, with what an unpipelined forward of the same
weights gives. ``command`` holds the command; a reader who wants to see how a trainer uses the
channel starts at ``producer`` and ``consumer``.
"""

from .command import main

__all__ = ["main"]
