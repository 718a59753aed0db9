import multiprocessing
import tempfile

import torch

from tapchannel import Mailbox, Outbox, TapPlan

plan = TapPlan({"features": ["layer1", "layer2"]}, width=3, dtype="float32", max_rows=2)


def produce(store):
    with Outbox(plan, rank=0, store=store) as outbox, outbox.open_pass(step=1, microbatches=1):
        outbox.push(0, "layer1", torch.full((2, 3), 1.0))
        outbox.push(0, "layer2", torch.full((2, 3), 2.0))


if __name__ == "__main__":
    store = f"file://{tempfile.mkdtemp()}"
    multiprocessing.get_context("spawn").Process(target=produce, args=(store,)).start()
    with Mailbox(plan, {0: ["layer1", "layer2"]}, store=store) as mailbox, mailbox.open_pass(1, 1):
        with mailbox.recv(0) as taps:
            print(taps["features"])  # both layers side by side, read in place
