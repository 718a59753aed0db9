"""The child's side of Children: what it runs first, and its line to the parent."""

from __future__ import annotations

import faulthandler
import pickle
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from support import processes
from support.child_errors import ChildError

POINT, RESULT, ERROR = "point", "result", "error"


class Message(NamedTuple):
    """What crosses the pipe: a point and its value, a result, or an error and its traceback."""

    kind: str
    value: Any
    detail: str = ""


# Plain pickle: multiprocessing's own hands tensors over as shared memory, which is gone if the
# child has ended before its parent looks.
def send(pipe: Connection, message: Message) -> None:
    """Send one message."""
    pipe.send_bytes(pickle.dumps(message))


def receive(pipe: Connection) -> Message:
    """Wait for one message."""
    return pickle.loads(pipe.recv_bytes())


class Link:
    """The first argument of every function that Children.start runs."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def reach(self, point: str, value: object = None) -> None:
        """Tell the parent that a point is reached, and hand it a value."""
        send(self._pipe, Message(POINT, value, point))

    def receive(self) -> Any:
        """Wait for what the parent sends; the parent's deadline ends this wait too."""
        return receive(self._pipe).value


def _crossing(error: BaseException, text: str) -> Exception:
    """Return the error if it survives pickling and means the same to the parent."""
    if not isinstance(error, Exception):
        return ChildError(text)  # the parent is not to exit because its child does
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - whatever a foreign class does there, the text is left
        return ChildError(text)
    return error if type(copy) is type(error) else ChildError(text)


def run(
    place: None,
    parent: int,
    pipe: Connection,
    stacks: Connection,
    function: Callable[..., object],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Run the function in this, the child's, process and send what comes of it.

    ``place`` has done its work by now: it moved the process as it was unpickled.
    """
    processes.end_with_parent(parent)
    faulthandler.register(signal.SIGUSR1, file=stacks.fileno(), all_threads=True)
    try:
        send(pipe, Message(RESULT, function(Link(pipe), *args, **kwargs)))
    except BaseException as error:  # noqa: BLE001 - the parent raises it
        text = traceback.format_exc()
        send(pipe, Message(ERROR, _crossing(error, text), text))
