"""A process of several that dies ends the others at once, with a line that names it.

JAX alone leaves the others in a collective that never ends, until its coordination service misses heartbeats
and aborts them. So each process has a TCP connection to process 0, which the kernel closes when a process
dies, and threads that read them. A message is `PROCESS CODE`: who ends in order says so with 0; who ends on
an error, with its exit code, and the others get a moment to end on the same error by themselves. Process 0
passes on what it hears. JAX's heartbeats remain for what no connection shows, a stopped process or a machine
that has gone: its abort is followed by a line of ours. No JAX here.
"""

import contextlib
import ctypes
import os
import secrets
import signal
import socket
import sys
import threading
import time
from typing import Any

GRACE_SECONDS = 5.0
"""Time for a process to end by itself when another has ended on an error."""
_DIED = -1


class Liveness:
    """Watches this process's connections, each in a thread, and ends it when another process is gone.

    Args:
        index, count: this process, and how many there are.
        peers: process number → connection; process 0 has all others, the others have process 0.
    """

    def __init__(self, index: int, count: int, peers: dict[int, socket.socket]) -> None:
        self.index, self.count, self._peers = index, count, peers
        self._failing = threading.Event()  # this process ends on an error of its own
        self._said = threading.Lock()  # taken once, by the thread that ends this process
        self._causes: list[tuple[int, int]] = []  # others end because of the first
        self._threads = [threading.Thread(target=self._watch, args=(peer,), daemon=True) for peer in peers]
        for thread in self._threads:
            thread.start()

    def leave(self, code: int) -> None:
        """Says that this process ends: in order with code 0, otherwise on an error."""
        if code:
            self._failing.set()
        self._tell(self.index, code)
        if code:
            self._wait_for_others(GRACE_SECONDS + 2.0)

    def _wait_for_others(self, seconds: float) -> None:
        """Waits for the others: JAX's service ends with process 0 and would abort those that are left."""
        until = time.monotonic() + seconds
        for thread in self._threads if self.index == 0 else ():
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))

    def _tell(self, process: int, code: int) -> None:
        for connection in self._peers.values():
            with contextlib.suppress(OSError):
                connection.sendall(f"{process} {code}\n".encode())

    def _watch(self, peer: int) -> None:
        process, code = peer, _DIED
        with contextlib.suppress(OSError):
            for line in self._peers[peer].makefile():
                process, code = map(int, line.split())
                if code:
                    break
        if code == 0:  # the connection's end after a farewell
            return
        self._causes.append((process, code))
        process, code = self._causes[0]
        if self.index == 0:
            self._tell(process, code)
        if self._failing.wait(GRACE_SECONDS if code > 0 else 0.0) or not self._said.acquire(blocking=False):
            return
        reason = f"has ended with exit code {code} (its own lines say why)"
        reason = "has died or lost its connection" if code == _DIED else reason
        _say(f"error: process {process} of {self.count} {reason}; process {self.index} ends with it")
        self._wait_for_others(2.0)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(1)


class AbortHandler:
    """Says a last line when the runtime aborts this process, and ends it with an exit code.

    JAX's client aborts from a C++ thread. Python's `signal` would come too late: it runs handlers in the main
    thread, which sits in a collective. A C handler runs before the end.

    Attributes:
        line, code: may be set anew.
        seconds: time for another thread to say more and end the process first.
    """

    def __init__(self, line: str, code: int) -> None:
        self.line, self.code, self.seconds = line, code, 0.0
        self._function = ctypes.CFUNCTYPE(None, ctypes.c_int)(self._on_abort)  # must outlive its installation
        install = ctypes.CDLL(None).signal
        install.restype, install.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
        install(signal.SIGABRT, ctypes.cast(self._function, ctypes.c_void_p))

    def _on_abort(self, _: int) -> None:
        time.sleep(self.seconds)
        _say(self.line)
        os._exit(self.code)

    def remove(self) -> None:
        """Gives the signal its default meaning back."""
        signal.signal(signal.SIGABRT, signal.SIG_DFL)


def connect(store: Any, index: int, count: int, host: str, seconds: int) -> dict[int, socket.socket]:
    """Connects process 0 with all others, over a port and a secret in the coordination service's store.

    Raises:
        OSError: not all have come in time, or process 0 cannot be reached.
    """
    key = "moejax/liveness"
    if index:
        port, secret = store.blocking_key_value_get(key, seconds * 1000).split()
        connection = socket.create_connection((host, int(port)), timeout=seconds)
        connection.sendall(f"{secret} {index}\n".encode())
        connection.settimeout(None)
        return {0: connection}
    peers: dict[int, socket.socket] = {}
    local = host in ("localhost", "127.0.0.1")
    with socket.create_server((host, 0)) if local else _on_all_interfaces(0) as server:
        secret = secrets.token_hex(16)
        store.key_value_set(key, f"{server.getsockname()[1]} {secret}")
        server.settimeout(seconds)
        while len(peers) < count - 1:
            connection = server.accept()[0]
            connection.settimeout(seconds)
            with contextlib.suppress(OSError, ValueError):  # a stranger's
                word, number = connection.makefile("rb", buffering=0).readline(256).decode().split()
                if word == secret:
                    connection.settimeout(None)
                    peers[int(number)] = connection
    return peers


def port_fault(port: int) -> str:
    """Returns why nothing can listen on that port, or "". JAX's service crashes on a port in use."""
    try:
        _on_all_interfaces(port).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _on_all_interfaces(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _say(line: str) -> None:
    """Writes to the real stderr, whatever has become of Python's."""
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode())
