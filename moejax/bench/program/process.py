"""A process of its own that has the devices of a target, and what it is asked; both travel pickled."""

import importlib
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from moejax.bench.program.compiler import environment, use_target
from moejax.core.errors import CompileError, MoejaxError


class Target(NamedTuple):
    """Devices of one node: the compiler's folder and a device's description, see
    `moejax.bench.program.compiler`, and how many there are."""

    folder: Path
    description: str
    devices: int = 1


def ask(module: str, target: Target, question: Any) -> Iterator[Any]:
    """Yields what `answer(question)` of a module yields in a process whose default devices are the target's.

    Raises:
        MoejaxError: what it raises there, and `CompileError` if the process dies.
    """
    with tempfile.TemporaryFile() as errors:
        command, pipe = [sys.executable, "-m", __name__, module], subprocess.PIPE
        with subprocess.Popen(
            command, env=environment(target.folder), stdin=pipe, stdout=pipe, stderr=errors
        ) as process:
            try:
                assert process.stdin is not None and process.stdout is not None
                pickle.dump((target, question), process.stdin)
                process.stdin.close()
                while (answer := pickle.load(process.stdout)) is not None:
                    if isinstance(answer, MoejaxError):
                        raise answer
                    yield answer
            except (EOFError, BrokenPipeError):
                code = process.wait()
                errors.seek(0)
                said = errors.read()[-4000:].decode(errors="replace")
                raise CompileError(f"the compiler's process ended with {code}:\n{said}") from None
            finally:
                process.kill()


def main() -> None:
    """Answers on stdout what stdin asks."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # whatever a compiler prints must not mix with the answers
    answer = importlib.import_module(sys.argv[1]).answer
    target, question = pickle.load(sys.stdin.buffer)
    import jax

    try:
        use_target(*target)
        with jax.default_device(jax.devices("cpu")[0]):  # for the few arrays that are made
            for item in answer(question):
                answers.write(pickle.dumps(item))
        answers.write(pickle.dumps(None))
    except MoejaxError as error:
        answers.write(pickle.dumps(error))


if __name__ == "__main__":
    main()
