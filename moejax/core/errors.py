"""Errors for a user's mistakes: each is one clear line, and the command line exits with 2 on any of them.

An exception that does not derive from `MoejaxError` is a defect of ours and keeps its traceback.
"""

import difflib
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class MoejaxError(Exception):
    """Base of every error that the user can mend. The text says what is wrong and what to do."""

    def _render_traceback_(self) -> list[str]:
        """Replaces IPython's traceback by the user's own line that led here, and the message."""
        frames = [f for f in traceback.extract_tb(self.__traceback__) if not _ours(f.filename)]
        where = [f"line {frames[-1].lineno}: {frames[-1].line}", ""] if frames and frames[-1].line else []
        return [*where, f"{type(self).__name__}: {self}"]


class ConfigError(MoejaxError, ValueError):
    """A configuration key or value is wrong, or two values do not fit each other."""


class CheckpointError(MoejaxError, ValueError):
    """A checkpoint is missing, damaged, or does not fit its configuration."""


class RequestError(MoejaxError, ValueError):
    """A prompt or its sampling parameters cannot be served."""


class DeviceError(MoejaxError, RuntimeError):
    """A device that was asked for is not there."""


class CompileError(MoejaxError, RuntimeError):
    """A step would have to be compiled after warm-up, which `engine.strict_compile` forbids."""


class StepError(MoejaxError, RuntimeError):
    """A step of the engine failed; the requests in it ended with finish reason "error".

    Attributes:
        outputs: the call's `RequestOutput`s, the failed ones with what they had.
    """

    def __init__(self, message: str, outputs: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.outputs = list(outputs)


class TrackingError(MoejaxError, RuntimeError):
    """An experiment tracker was asked for and cannot be had."""


class OutputError(MoejaxError, OSError):
    """A result cannot be written where it was asked for."""


class ReportError(OutputError):
    """A result is written, but not all that shows it: a plot, a table, the tracker's copy."""


@contextmanager
def os_errors(kind: type[MoejaxError], what: str) -> Iterator[None]:
    """Raises as `kind`, `what` before the reason, what the system refuses the body, and text not in UTF-8."""
    try:
        yield
    except MoejaxError:
        raise
    except OSError as error:
        raise kind(f"{what}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise kind(f"{what}: not UTF-8 text") from error


def _ours(filename: str) -> bool:
    """Returns whether a frame's file is Python's, a library's or this one's, and not what the user wrote."""
    path, library = Path(filename), Path(__file__).parents[1]
    libraries = (library, library.with_name("experiments"))
    return "site-packages" in path.parts or any(folder in path.parents for folder in libraries)


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Returns `"; did you mean 'x'?"`, x the nearest of `known` after `prefix`; nothing if none is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.65)
    return f"; did you mean {prefix + near[0]!r}?" if near else ""


def refuse(setting: str, asked: bool, refusals: Mapping[str, object], instead: str = "") -> None:
    """Raises `ConfigError` where a setting is asked for and does not go with one of these, that holds."""
    for reason, holds in refusals.items():
        if asked and holds:
            raise ConfigError(f"{setting} does not go with {reason}{instead}")


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """Returns one line on an unknown name: what it is, the nearest valid name, and all valid names."""
    names = sorted(known)
    return f"unknown {kind} {name!r}{did_you_mean(name, names)} (known: {', '.join(names) or 'none'})"
