"""A process of several that dies ends the others, with a line that names it.

JAX alone leaves the others in a collective that never ends, until its coordination service misses heartbeats
and aborts them with a C++ stack trace, or aborts them at once if process 0 is the one that died. So:

    process 0 ←── one TCP connection each ──→ processes 1, 2, …

The kernel closes a dead process's connections at once, wherever it was; keep-alive finds a machine that has
gone. Who leaves in order says "bye" first. Who ends on an error says "failed" with its exit code, and the
others get a moment to end on the same error by themselves. Process 0 tells the others of each. JAX's
heartbeats remain for what no connection shows (a stopped process): its abort is followed by a line of ours.
No JAX here.
"""

import contextlib
import ctypes
import os
import queue
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable

GRACE_SECONDS = 5.0
"""What a process gets to end by itself when another has ended on an error."""
_FAREWELL_SECONDS = 2.0


class Liveness:
    """This process's connections and the thread that watches them.

    Args:
        index, count: this process, and how many there are.
        peers: process number → connection; process 0 has all others, the others have process 0.
        coordinator: host and port of JAX's coordination service.
        heartbeat_seconds: after so long a silent machine counts as gone.
        abort_handler: says this object's line from now on.
    """

    def __init__(
        self,
        index: int,
        count: int,
        peers: dict[int, socket.socket],
        coordinator: tuple[str, int],
        heartbeat_seconds: int,
        abort_handler: "AbortHandler",
    ) -> None:
        self.index, self.count = index, count
        self._peers, self._coordinator = peers, coordinator
        self._left: set[int] = set()
        self._told = threading.Lock()  # taken once, by whoever says why this process ends
        self._ending = threading.Event()  # this process ends by itself
        for connection in peers.values():
            _keep_alive(connection, heartbeat_seconds)
        self._lost: queue.SimpleQueue[tuple[int, int | None]] = queue.SimpleQueue()
        self.abort_handler = abort_handler
        abort_handler.line = self._abort_line
        # Two, since the one that ends this process waits; both now: none starts at the interpreter's end.
        threading.Thread(target=self._watch, name="liveness", daemon=True).start()
        threading.Thread(target=self._end, name="liveness-end", daemon=True).start()

    # -- what this process says ------------------------------------------------------------------------

    def bye(self) -> None:
        """Says that this process leaves in order."""
        self._tell("bye\n")

    def failed(self, code: int) -> None:
        """Says that this process ends on an error, and waits a moment for the others to do so."""
        self._ending.set()
        self._tell(f"failed {self.index} {code}\n")
        if self.index == 0:  # JAX's service ends with this process and would abort those that are left
            self._wait_for_others(GRACE_SECONDS + _FAREWELL_SECONDS)

    def close(self) -> None:
        """Stops watching and gives the abort signal back."""
        self._ending.set()
        self.abort_handler.remove()

    def _tell(self, line: str, but: int | None = None) -> None:
        for number, connection in self._peers.items():
            if number != but:
                with contextlib.suppress(OSError):
                    connection.sendall(line.encode())

    def _wait_for_others(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and set(self._peers) - self._left:
            time.sleep(0.02)

    # -- what it hears ---------------------------------------------------------------------------------

    def _watch(self) -> None:
        selector, texts = selectors.DefaultSelector(), dict.fromkeys(self._peers, b"")
        for number, connection in self._peers.items():
            selector.register(connection, selectors.EVENT_READ, number)
        open_ones = set(self._peers)
        while open_ones:
            for key, _ in selector.select():
                number = key.data
                try:
                    data = self._peers[number].recv(4096)
                except OSError:
                    data = b""
                *lines, texts[number] = (texts[number] + data).split(b"\n")
                for line in lines:
                    self._hear(number, line.decode(errors="replace").split())
                if not data:
                    selector.unregister(key.fileobj)
                    open_ones.discard(number)
                    if number not in self._left:
                        self._left.add(number)
                        self._lost.put((number, None))

    def _hear(self, number: int, words: list[str]) -> None:
        if words == ["bye"]:
            self._left.add(number)
        elif words[:1] == ["failed"]:
            self._left.add(int(words[1]))
            self._lost.put((int(words[1]), int(words[2])))
        elif words[:1] == ["died"]:
            self._lost.put((int(words[1]), None))

    def _end(self) -> None:
        """When another process is gone, this one ends too."""
        number, code = self._lost.get()
        if self.index == 0:
            self._tell(f"died {number}\n" if code is None else f"failed {number} {code}\n", but=number)
        if self._ending.wait(0.0 if code is None else GRACE_SECONDS) or not self._told.acquire(
            blocking=False
        ):
            return
        _say(_lost_line(self.index, self.count, number, code))
        if self.index == 0:
            self._wait_for_others(_FAREWELL_SECONDS)
        _flush()
        os._exit(1)

    def _abort_line(self) -> tuple[str, int | None]:
        """What to say when JAX's client aborts this process, and the exit code if it is not to dump core."""
        if self._ending.is_set():
            return "", None
        if not self._told.acquire(blocking=False):
            time.sleep(_FAREWELL_SECONDS)  # another thread has said it and is about to end the process
            return "", None
        if self.index != 0 and not _answers(self._coordinator):
            return _lost_line(self.index, self.count, 0, None), 1
        return (
            f"error: process {self.index} of {self.count} was aborted: another process has died or lost its "
            "connection, or the runtime has failed; the lines above say which"
        ), None


class AbortHandler:
    """Says a last line when the runtime aborts this process.

    JAX's client does so from a C++ thread. Python's `signal` would come too late: it runs handlers in the
    main thread, which sits in a collective. A C handler runs before the end.

    Attributes:
        line: gives the line, empty for none, and an exit code, or None to let the abort go on.
    """

    def __init__(self, line: Callable[[], tuple[str, int | None]]) -> None:
        self.line = line
        self._function = ctypes.CFUNCTYPE(None, ctypes.c_int)(self._on_abort)  # must outlive its installation
        install = ctypes.CDLL(None).signal
        install.restype, install.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
        install(signal.SIGABRT, ctypes.cast(self._function, ctypes.c_void_p))

    def _on_abort(self, _: int) -> None:
        line, code = self.line()
        if line:
            _say(line)
        if code is not None:
            os._exit(code)

    def remove(self) -> None:
        """Gives the signal its default meaning back."""
        signal.signal(signal.SIGABRT, signal.SIG_DFL)


def port_fault(port: int) -> str:
    """Why nothing can listen on that port; empty if something can. JAX's service crashes on a port in use."""
    try:
        _everywhere(port).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _everywhere(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=128)
    return socket.create_server(("", port), backlog=128)


def listen(host: str) -> socket.socket:
    """Process 0's listener, on a port of the system's choice: for this machine only where `host` is."""
    if host not in ("localhost", "127.0.0.1", "::1"):
        return _everywhere(0)
    family = socket.AF_INET6 if host == "::1" else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=128)


def accept(listener: socket.socket, count: int, token: str, seconds: float) -> dict[int, socket.socket]:
    """Process 0: a connection from every other process that knows the token.

    Raises:
        TimeoutError: not all have come in time.
    """
    peers: dict[int, socket.socket] = {}
    until = time.monotonic() + seconds
    with listener:
        while len(peers) < count - 1:
            listener.settimeout(max(0.01, until - time.monotonic()))
            connection = listener.accept()[0]
            connection.settimeout(max(0.01, until - time.monotonic()))
            with contextlib.suppress(OSError, ValueError):
                greeting = connection.makefile("rb", buffering=0).readline(256).decode().split()
                if len(greeting) == 2 and greeting[0] == token and 0 < int(greeting[1]) < count:
                    connection.settimeout(None)
                    peers[int(greeting[1])] = connection
                    continue
            connection.close()
    return peers


def join(host: str, port: int, index: int, token: str, seconds: float) -> dict[int, socket.socket]:
    """Another process: its connection to process 0.

    Raises:
        OSError: process 0 cannot be reached.
    """
    connection = socket.create_connection((host, port), timeout=seconds)
    connection.sendall(f"{token} {index}\n".encode())
    connection.settimeout(None)
    return {0: connection}


def _keep_alive(connection: socket.socket, seconds: int) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # A third of the time to the first probe, then three of them.
    for option, value in (
        ("TCP_KEEPIDLE", max(1, seconds // 3)),
        ("TCP_KEEPINTVL", max(1, seconds // 6)),
        ("TCP_KEEPCNT", 3),
    ):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _answers(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, timeout=1.0).close()
    except OSError:
        return False
    return True


def _lost_line(index: int, count: int, number: int, code: int | None) -> str:
    what = (
        "has died or lost its connection"
        if code is None
        else f"has ended with exit code {code} (its own lines say why)"
    )
    return f"error: process {number} of {count} {what}; process {index} ends with it"


def _say(line: str) -> None:
    """To the real stderr, whatever has become of Python's."""
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode())


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
