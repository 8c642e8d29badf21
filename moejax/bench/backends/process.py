"""A peer's worker process: JSON lines over pipes, its log, and its end. Knows nothing of engines or JAX."""

import contextlib
import json
import os
import select
import subprocess
import time
from collections import deque
from pathlib import Path
from typing import Any

from moejax.bench.backends.base import BackendError
from moejax.core.files import ensure_writable
from moejax.core.words import one_line

_PIECE = 1 << 16
_CLOSE_S = 5.0


class Worker:
    """A running worker.

    It is in a session of its own, so that Ctrl-C reaches this process alone, which then ends it; and it ends
    by itself when its stdin does, should this process be killed.

    Args:
        name: the backend's, for messages.
        python: the interpreter.
        script: a file in `workers/`.
        log: where its stderr goes.
        timeout_s: longest wait for any of its lines.

    Raises:
        BackendError: the interpreter cannot be started.
        OutputError: the log's folder cannot be made or written.
    """

    def __init__(self, name: str, python: str, script: Path, log: Path, timeout_s: float) -> None:
        self.name, self.log, self.timeout_s = name, log, timeout_s
        self._lines: deque[bytes] = deque()
        self._rest = b""
        ensure_writable(log.parent)
        with open(log, "wb") as errors:
            try:
                self._process = subprocess.Popen(
                    [python, "-u", str(script)],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, bufsize=0,
                    start_new_session=True, env=_environment(),
                )  # fmt: skip
            except OSError as error:
                raise BackendError(
                    f"backend {name}: cannot start {python!r}: {error.strerror or error}"
                ) from error
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._in, False)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        """Sends a message and returns its answer.

        Raises:
            BackendError: as for `receive`; also if it died before it could be told.
        """
        self.send(op, **fields)
        return self.receive()

    def send(self, op: str, **fields: Any) -> None:
        """Sends a message. What the worker says meanwhile is kept: two full pipes would wait for each
        other."""
        data = memoryview((json.dumps({"op": op, **fields}) + "\n").encode())
        until = time.monotonic() + self.timeout_s
        while data:
            readable, writable, _ = select.select(
                [self._out], [self._in], [], max(0.0, until - time.monotonic())
            )
            if not readable and not writable:
                raise self._silent()
            if readable:
                self._read()
            if writable:
                try:
                    data = data[os.write(self._in, data[:_PIECE]) :]
                except BrokenPipeError as error:
                    raise self._died() from error

    def receive(self) -> dict[str, Any]:
        """The next message.

        Raises:
            BackendError: it died, said that something failed, said something else than JSON, or said nothing
                for `timeout_s`. It is then ended.
        """
        while not self._lines:
            if not select.select([self._out], [], [], self.timeout_s)[0]:
                raise self._silent()
            self._read()
        return self._parse(self._lines.popleft())

    @property
    def has_line(self) -> bool:
        """Whether `receive` would return at once."""
        if not self._lines and select.select([self._out], [], [], 0)[0]:
            self._read()
        return bool(self._lines)

    def close(self) -> None:
        """Ends it: by the end of its stdin, and where that does not help within seconds, by force."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._kill()
        except BaseException:
            self._kill()
            raise

    def _kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self) -> None:
        piece = os.read(self._out, _PIECE)
        if not piece:
            raise self._died()
        *lines, self._rest = (self._rest + piece).split(b"\n")
        self._lines.extend(line for line in lines if line.strip())

    def _parse(self, line: bytes) -> dict[str, Any]:
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict) or "event" not in message:
            self._kill()
            text = line[:80].decode(errors="replace")
            raise BackendError(f"backend {self.name} said something that is no message of a worker: {text!r}")
        if message["event"] == "error":
            self.close()
            raise WorkerFault(f"backend {self.name}: {one_line(message['message'])}", message.get("module"))
        return message

    def _died(self) -> BackendError:
        """Why it is gone: the last message that it got out says more than its exit code."""
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._kill()
        while select.select([self._out], [], [], 0)[0] and (piece := os.read(self._out, _PIECE)):
            self._rest += piece
        for line in (*self._lines, *self._rest.split(b"\n")):
            with contextlib.suppress(ValueError):
                message = json.loads(line)
                if isinstance(message, dict) and message.get("event") == "error":
                    return WorkerFault(f"backend {self.name}: {message['message']}", message.get("module"))
        code = self._process.returncode
        ending = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        return BackendError(f"backend {self.name}: its process {ending}{self._last_words()}")

    def _silent(self) -> BackendError:
        self._kill()
        return BackendError(
            f"backend {self.name} said nothing for {self.timeout_s:g} s and was ended (backend.timeout_s)"
            f"{self._last_words()}"
        )

    def _last_words(self) -> str:
        """Its log's last line, and where the log is."""
        try:
            lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        except OSError:
            return ""
        return f"; last line of {self.log}: {lines[-1].strip()[:200]}" if lines else f" (log: {self.log})"


class WorkerFault(BackendError):
    """A failure that a worker reports. `module`: the package that its interpreter lacks, if that was it."""

    def __init__(self, message: str, module: str | None) -> None:
        super().__init__(message)
        self.module = module


def _environment() -> dict[str, str]:
    """This process's, without what would lead another interpreter into our own packages."""
    dropped = ("PYTHONPATH", "PYTHONHOME", "PYTHONWARNINGS", "__PYVENV_LAUNCHER__")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    # Weights are on this machine; nobody waits for a hub that cannot be reached.
    return {**kept, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
