"""The fault campaign: every fault, on either side, at every moment, on every wire."""

import os

# numpy's threads, made as it is imported, would not be in the processes that are forked.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
