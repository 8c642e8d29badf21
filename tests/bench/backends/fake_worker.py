"""A worker without a model, run as a program: the real protocol around a rule for tokens, and on demand every
way to fail. The k-th token after a prompt is (sum of the prompt + k) mod 100."""

import os
import signal
import sys
import time
from collections import deque
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "moejax" / "bench" / "backends" / "workers"))
from serve import Engine, Step, WorkerError, serve


class Fake(Engine):
    """Continuous batches of `max_num_seqs`. `options`: `fail` names what goes wrong, `at` at which step."""

    def load(self, options):
        self.fake = options["options"]
        self.count, self.limit = 0, 1
        print("a library's chatter")  # must not get between the protocol's lines
        print("loading went well", file=sys.stderr)
        fail = self.fake.get("fail")
        if fail == "load":
            raise WorkerError("cannot load it: no such weights")
        if fail == "module":
            raise WorkerError("No module named 'transformers'", module="transformers")
        if fail == "defect":
            raise KeyError("a defect")
        return {
            "facts": {"versions": {"fake": "1.0"}, "dtype": "float32", "device": "cpu", "threads": 1},
            "vocab_size": self.fake.get("vocab_size", 100),
            "max_model_len": 64,
        }

    def prepare(self, max_num_seqs, max_total_len):
        self.limit = max_num_seqs

    def memory(self):
        return {"model_bytes": 1234, "bits_per_parameter": 32.0, "limit": self.limit}

    def forward(self):
        self._fail()
        self.count += 1
        admitted = []
        while self.waiting and len(self.running) < self.limit:
            admitted.append(self.waiting.popleft())
            self.running.append(admitted[-1])
        time.sleep(self.fake.get("step_s", 0.0))
        start = self.fake.get("start", 0)
        pairs = [(r, (start + sum(r.prompt) + len(r.tokens)) % 100) for r in self.running]
        prefill = sum(len(r.prompt) for r in admitted)
        decode = len(self.running) - len(admitted)
        return Step(pairs, admitted, prefill, decode, prefill + decode)

    def _fail(self):
        if self.count != self.fake.get("at", -1):
            return
        kind = self.fake["fail"]
        print(f"about to {kind}", file=sys.stderr, flush=True)
        if kind == "exit":
            os._exit(3)
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "hang":
            time.sleep(600)
        if kind == "garbage":
            os.write(self.fake_out, b"this is no JSON\n")
        if kind == "say":
            raise WorkerError("the cache is full")


if __name__ == "__main__":
    Fake.fake_out = os.dup(1)
    engine = Fake()
    engine.waiting = deque()
    serve(engine)
