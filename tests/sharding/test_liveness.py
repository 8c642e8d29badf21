"""Processes that watch each other, without JAX: three, of which one ends in each of the ways there are."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.examples import slow_but

SCRIPT = """
import os, sys, time
from pathlib import Path
from moejax.sharding.liveness import Liveness, connect

class Store:
    "As the coordination service's, in a file."
    file = Path(sys.argv[2])
    def key_value_set(self, key, value):
        self.file.with_suffix(".new").write_text(value)
        self.file.with_suffix(".new").rename(self.file)
    def blocking_key_value_get(self, key, milliseconds):
        while not self.file.exists():
            time.sleep(0.01)
        return self.file.read_text()

index, victim, how = int(sys.argv[1]), int(sys.argv[3]), sys.argv[4]
liveness = Liveness(index, 3, connect(Store(), index, 3, "127.0.0.1", 20))
print("connected", flush=True)
if index == victim or how == "all fail":
    sys.stdin.readline()
    if how != "killed":
        code = 0 if how == "in order" else 3 + index
        liveness.leave(code)
        os._exit(code)
if how == "in order":
    time.sleep(0.5)
    liveness.leave(0)
    os._exit(0)
time.sleep(30)
"""


CASES = [(how, victim) for how in ("killed", "fails", "in order") for victim in (0, 1)] + [("all fail", 0)]


@pytest.mark.parametrize(("how", "victim"), slow_but([case for case in CASES if case != ("fails", 0)], CASES))
def test_the_end_of_one_ends_the_others(tmp_path: Path, how: str, victim: int) -> None:
    argv = [str(tmp_path / "store"), str(victim), how]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = [subprocess.Popen([sys.executable, "-c", SCRIPT, str(i), *argv], **pipes) for i in range(3)]
    try:
        for process in running:
            assert process.stdout.readline() == "connected\n"
        begin = time.monotonic()
        for process in running if how == "all fail" else [running[victim]]:
            if how == "killed":
                process.send_signal(signal.SIGKILL)
            else:
                process.stdin.write("end\n")
                process.stdin.flush()
        said = [process.communicate(timeout=20)[1].splitlines() for process in running]
        seconds = time.monotonic() - begin
    finally:
        for process in running:
            process.kill()
    codes = [process.returncode for process in running]
    if how in ("in order", "all fail"):  # nobody is taken for dead, and an error of one's own goes before
        assert codes == ([0, 0, 0] if how == "in order" else [3, 4, 5]) and said == [[], [], []]
        assert seconds < 4
        return
    reason = f"has ended with exit code {3 + victim} (its own lines say why)"
    reason = "has died or lost its connection" if how == "killed" else reason
    for index in {0, 1, 2} - {victim}:
        assert codes[index] == 1
        assert said[index] == [f"error: process {victim} of 3 {reason}; process {index} ends with it"]
    assert codes[victim] == (-signal.SIGKILL if how == "killed" else 3 + victim) and said[victim] == []
    assert seconds < 4 if how == "killed" else 4 < seconds < 12
