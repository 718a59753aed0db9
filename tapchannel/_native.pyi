"""
Native core of tapchannel: control block, lanes, mailbox, CUDA driver loaded at run time.
"""

from collections.abc import Sequence


def layout() -> dict[str, int]:
    """Offsets and constants of the control block, for the check at import."""

def block_bytes(depth: int, cells: int) -> int:
    """The size of a lane's control block."""

def step_names() -> list[str]:
    """Names of the flight recorder's steps, by number."""

def close_in_child(fd: int) -> None:
    """A forked child closes this descriptor at once."""

def keep_in_child(fd: int) -> None: ...

class Holder:
    @property
    def step(self) -> int: ...

    @property
    def microbatch(self) -> int: ...

    @property
    def slot(self) -> int: ...

    @property
    def leased(self) -> bool: ...

class Verdict:
    @property
    def fault(self) -> str: ...

    @property
    def lane(self) -> int: ...

    @property
    def cell(self) -> int: ...

    @property
    def slot(self) -> int: ...

    @property
    def key(self) -> int: ...

    @property
    def seen(self) -> int: ...

    @property
    def expected(self) -> int: ...

    @property
    def waited(self) -> float: ...

    @property
    def limit(self) -> float: ...

    @property
    def silent(self) -> float: ...

    @property
    def reason(self) -> bytes: ...

    @property
    def holders(self) -> list[Holder]: ...

class Arena:
    """Memory that holds the slots."""

    @staticmethod
    def create_host(name: str, bytes: int) -> Arena:
        """Makes a sealed memfd of this size and commits its pages."""

    @staticmethod
    def adopt_host(fd: int, bytes: int) -> Arena:
        """
        Maps a received memfd after checking its size and seals; takes the descriptor over.
        """

    @staticmethod
    def create_vmm(ordinal: int, bytes: int) -> Arena:
        """Allocates device memory that is exported as a file descriptor."""

    @staticmethod
    def create_ipc(ordinal: int, bytes: int) -> Arena:
        """Allocates device memory that is exported as a classic CUDA IPC handle."""

    @staticmethod
    def import_vmm(ordinal: int, fd: int, bytes: int) -> Arena:
        """
        Maps a peer's device memory for a device of this process; the descriptor stays the caller's.
        """

    @staticmethod
    def import_ipc(ordinal: int, handle: bytes, bytes: int) -> Arena:
        """Opens a peer's classic CUDA IPC handle."""

    def time_reads(self, bytes: int, times: int) -> float:
        """
        The seconds of the shortest of several reads of the first bytes, into memory of this process; writes nothing.
        """

    def write_probe(self, offset: int, pattern: bytes) -> None:
        """
        Writes bytes and waits until they are performed; for the attach self-test.
        """

    def read_probe(self, offset: int, bytes: int) -> bytes:
        """Reads bytes back; for the attach self-test."""

    def share(self) -> Arena:
        """
        A second reference to the same memory, for an outbox of the same process.
        """

    def drop(self) -> None:
        """Lets go of this reference to the memory; the last one frees it."""

    def export_fd(self) -> int:
        """A new descriptor of the memory, the caller's to close."""

    def export_handle(self) -> bytes: ...

    @property
    def kind(self) -> str: ...

    @property
    def bytes(self) -> int: ...

def arrival_bytes(depth: int, cells: int) -> int:
    """The size of one lane's arrival words."""

class ControlBlock:
    """The shared words of one lane."""

    @staticmethod
    def create(name: str, lane: int, depth: int, cells: int, mailbox_id: bytes) -> ControlBlock: ...

    @staticmethod
    def adopt(fd: int, lane: int, depth: int, cells: int, mailbox_id: bytes) -> ControlBlock:
        """
        Maps a received block after checking its size, seals and header; takes the descriptor over.
        """

    def export_fd(self) -> int: ...

    def events(self, producer: bool) -> list[tuple[int, ...]]:
        """
        The flight recorder of one side: (number, time_ns, key, bytes, step, cell), oldest first.
        """

def ucx_load(preload: Sequence[str], path: str) -> str:
    """Loads UCX, once per process, and gives its version."""

class UcxMemory:
    """Memory that a peer with its key may write."""

    @property
    def address(self) -> int: ...

    @property
    def key(self) -> bytes: ...

class UcxContext:
    """One UCX context: its devices, its rules."""

    def __init__(self, settings: Sequence[tuple[str, str]], ordinal: int | None) -> None:
        """ordinal: the GPU whose memory it registers and moves, if any."""

    def register(self, arena: Arena) -> UcxMemory: ...

    def register_block(self, block: ControlBlock) -> UcxMemory:
        """The block must outlive the link that this registration is given to."""

    def describe(self) -> str:
        """UCX's own list of its transports and devices."""

class UcxLink:
    """One end of a lane between hosts."""

    def __init__(self, context: UcxContext, consumer: bool, block: UcxMemory, limit: float) -> None: ...

    @property
    def address(self) -> bytes: ...

    def connect(self, address: bytes, block: tuple[int, int, bytes], arena: tuple[int, int, bytes], words: tuple[int, int, bytes]) -> None:
        """Connects to a peer's worker; the regions are (address, bytes, key)."""

    def write(self, offset: int, bytes: bytes, limit: float) -> None:
        """
        Puts bytes into the peer's arena and waits until they are performed there.
        """

    def measure(self, offset: int, bytes: int, count: int, limit: float) -> float:
        """
        Puts zeros into the peer's arena, several times over; gives the seconds.
        """

    def transports(self) -> list[str]: ...

    @property
    def rings(self) -> bool: ...

    @property
    def failure(self) -> str: ...

    def settle(self, limit: float) -> bool:
        """Waits until this side's words have been performed at the other side."""

    def end(self) -> None: ...

    def wire(self, ordinal: int | None, ucx_reads_gpu: bool) -> Wire:
        """
        The producer's transport over this link, from host memory or from a GPU.
        """

class Mailbox:
    """The consumer's core."""

    def __init__(self, arena: Arena, blocks: list[ControlBlock], cells: list[list[tuple[int, ...]]], depth: int, slot_bytes: int, fill_released: bool) -> None: ...

    def open_pass(self, step: int, microbatches: int) -> Verdict | None: ...

    def close_pass(self, timeout: float) -> Verdict | None: ...

    def abort(self, reason: str) -> None: ...

    def reset(self) -> Verdict | None: ...

    def close(self) -> None: ...

    def recv(self, microbatch: int, mode: int, stream: int, timeout: float, rows: int) -> tuple[Verdict | None, int, object]:
        """
        (verdict or None, lease, DLPack capsule of the slot); mode 0 try, 1 host, 2 stream.
        """

    def check(self) -> Verdict | None: ...

    def check_lease(self, lease: int) -> Verdict | None: ...

    def settle(self, lease: int, timeout: float) -> Verdict | None: ...

    def announce(self, lane: int, cell: int, key: int) -> tuple[int, int, tuple[int, ...], bool, int | None] | None:
        """
        (rows, row_begin, shape, dropped, checksum or None), or None while nothing is announced.
        """

    def record_stream(self, lease: int, stream: int) -> bool: ...

    def holders(self) -> list[Holder]: ...

    @property
    def epoch(self) -> int: ...

    def may_attach(self, lane: int) -> int:
        """0 free, 1 taken, 2 not fenced yet, 3 closed, 4 revoked."""

    def attach(self, lane: int, socket: int, pidfd: int, same_process: bool, staged: bool, link: UcxLink | None) -> int:
        """
        Takes both descriptors over when it returns 0. staged: its payload passes the gate.
        """

    def open_gate(self, staging: Arena) -> bool:
        """Makes the gate unless there is one; False once closed."""

    def arrivals_fd(self, lane: int, name: str) -> int:
        """
        A new descriptor of the lane's arrival words, the caller's to close; -1 without a gate.
        """

    def undo_attach(self, lane: int) -> None: ...

    def revoke(self, lane: int, reason: str) -> None: ...

    def carried(self, limit: float) -> bool:
        """Waits until each producer's control block says what this side's says."""

    def register_block(self, lane: int, context: UcxContext) -> UcxMemory:
        """Registers a lane's control block."""

    def lane_status(self, lane: int) -> dict[str, bool | int | float | None]: ...

    def block_fd(self, lane: int) -> int: ...

    def events(self, lane: int, producer: bool) -> list[tuple[int, ...]]: ...

class Wire:
    """How a lane's bytes cross; an outbox takes it over."""

    def __init__(self, arena: Arena) -> None: ...

    @staticmethod
    def staged(staging: Arena, arrivals: Arena, ordinal: int | None) -> Wire:
        """Into staging memory that a gate empties, by this GPU, or by the CPU."""

class Outbox:
    """The producer's core: one lane."""

    def __init__(self, wire: Wire, block: ControlBlock, cells: list[tuple[int, ...]], slot_bytes: int, drop_newest: bool, queue_limit: int, timeout: float, credit_wait: float, socket: int) -> None:
        """Takes the wire, the block and the socket's descriptor over."""

    def open_pass(self, step: int, microbatches: int) -> Verdict | None: ...

    def close_pass(self) -> Verdict | None: ...

    def push(self, microbatch: int, cell: int, data: int, rows: int, pitch: int, row_begin: int, stream: int, shape: tuple[int, ...], owner: object, version: int, checksum: int | None) -> Verdict | None:
        """None, or the verdict of a push that did not happen."""

    def flush(self, timeout: float) -> Verdict | None: ...

    def abort(self, reason: str) -> None: ...

    def close(self) -> None: ...

    def check(self) -> Verdict | None: ...

    def carried(self, limit: float) -> bool:
        """Waits until the consumer's control block says what this side's says."""

    def has_credit(self, microbatch: int) -> bool:
        """Whether a push of this microbatch would not have to wait."""

    def counters(self) -> dict[str, int | float]: ...

    def events(self, producer: bool) -> list[tuple[int, ...]]: ...

class Faults:
    """What befalls the next messages of a lane, for tests."""

    def __init__(self) -> None: ...

    def next(self, mishap: str, seconds: float = 0.0) -> None: ...

    def let_go(self) -> None:
        """Puts and stamps what was held, in order."""

    def held(self) -> int:
        """Counts the calls that wait for let_go."""

    def wrap(self, wire: Wire) -> Wire:
        """A wire of which this is the fate; takes the given one over."""

def cuda_status() -> dict[str, object]:
    """
    Say whether the CUDA driver is usable, and why not: available, refusal, driver_version.
    """

def device_count() -> int:
    """Count the CUDA devices that this process sees; 0 without a driver."""

def device_info(ordinal: int) -> dict[str, object]:
    """Describe one CUDA device without making a context on it."""

def can_access_peer(ordinal: int, peer_ordinal: int) -> bool:
    """Say whether one device can map the other's memory."""
