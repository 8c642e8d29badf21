"""Our engine under a load during which it takes another layout."""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from moejax.bench.backends.moejax import MoejaxBackend
from moejax.core.parallel import ParallelConfig
from moejax.engine.llm import LLM
from moejax.engine.reconfigure import Reconfigured


class ReconfiguringBackend(MoejaxBackend):
    """Takes the layout `to` once `after` requests of a pass are there, in a thread beside the one that
    serves, and its first one again before the next pass. `changes` are those under load."""

    def __init__(self, llm: LLM, after: int, to: ParallelConfig) -> None:
        super().__init__(llm)
        self.first, self.after, self.to = llm.parallel_config, after, to
        self.changes: list[Reconfigured] = []
        self._threads = ThreadPoolExecutor(1)
        self._changing: Future[Reconfigured] | None = None

    def prepare(self, **options: Any) -> None:
        super().prepare(**options)
        for layout in (self.to, self.first):  # else the first change would compile under load
            self.llm.reconfigure(layout)

    def submit(self, *args: Any, **options: Any) -> Any:
        output = super().submit(*args, **options)
        if self._submitted == self.after:
            self._changing = self._threads.submit(self.llm.reconfigure, self.to)
        return output

    def forget(self) -> None:
        self._settle()
        if self.llm.parallel_config != self.first:
            self.llm.reconfigure(self.first)
        super().forget()

    def close(self) -> None:
        self._settle()
        super().close()

    def _settle(self) -> None:
        """Waits for a change that is under way, and raises what it has."""
        if self._changing is not None:
            changing, self._changing = self._changing, None
            self.changes.append(changing.result())


def reconfigured_rows(backends: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns a row for each change under load of these variants: the pause by part, bytes, samples."""
    rows = []
    for name, backend in backends.items():
        for done in backend.changes if isinstance(backend, ReconfiguringBackend) else ():
            row: dict[str, Any] = {"variant": name, "pause_ms": 1e3 * done.pause_s}
            for field, value in vars(done).items():
                row |= {field[:-1] + "ms": 1e3 * value} if field.endswith("_s") else {field: value}
            rows.append(row)
    return rows
