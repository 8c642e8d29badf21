"""A routing trace of an engine: which experts each computed token visited in each layer, column by column.

A row is one token computed in one step; rows are in the order in which they were computed. A token that is
computed again (after preemption) has a row each time; one that was found computed has a marked row. Knows
nothing of engines, files of weights or JAX.
"""

import dataclasses
import functools
import hashlib
import json
import os
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moejax.core import html
from moejax.core.config import ModelConfig
from moejax.core.errors import ConfigError
from moejax.core.files import atomic_file, dump_json
from moejax.core.words import byte_words

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

SCHEMA = 2  # 1 had no rows of tokens that were found computed
CAPTURE_FILE = "routing.npz"
_MOST_LAYERS = 24  # in a notebook
_COUNTED_ROWS = 1 << 14
COLUMNS = ("ids", "weights", "step", "request", "sample", "position", "prefill", "cached")


@dataclass(frozen=True)
class CapturedRequest:
    """A request of the trace.

    Attributes:
        request_id: the engine's.
        prompt_hash: `hash_tokens` of its prompt, by which a replay finds it; empty where it was generated and
            not captured: such requests stand for any prompt, in order.
        prompt_len: tokens.
        case: row in the result's `cases` that it belongs to, where an experiment captured it.
        adapter: the name of its LoRA adapter.
    """

    request_id: str
    prompt_hash: str
    prompt_len: int
    case: int | None = None
    adapter: str | None = None


@dataclass(frozen=True)
class RoutingCapture:
    """The trace. R rows, L MoE layers, k experts per token.

    Attributes:
        ids: uint8 or uint16 `[R, L, k]`, by falling router probability; `num_experts` where no expert ran.
        weights: float32 `[R, L, k]`, 0 where no expert ran.
        step: int32 `[R]`, rising; which rows were computed together.
        request: int32 `[R]`, index into `requests`.
        sample: int32 `[R]`, which of the request's samples.
        position: int32 `[R]`, of the token in its sequence.
        prefill: bool `[R]`, the step computed it as part of a prompt (or of what is computed again).
        requests: see `CapturedRequest`.
        layers: the model's layer that each of the L is.
        num_experts: E.
        origin: "captured" or "generated".
        meta: JSON-like: model, checkpoint_hash, how a generator was called, versions.
        cached: bool `[R]`, nothing was computed: the prefix cache had the token, and the row is that of who
            computed it. It stands before the rows of the step in which the request went on.
    """

    ids: np.ndarray
    weights: np.ndarray
    step: np.ndarray
    request: np.ndarray
    sample: np.ndarray
    position: np.ndarray
    prefill: np.ndarray
    requests: tuple[CapturedRequest, ...]
    layers: tuple[int, ...]
    num_experts: int
    origin: str = "captured"
    meta: Mapping[str, Any] = field(default_factory=dict)
    cached: np.ndarray = field(default_factory=lambda: np.zeros(0, np.bool_))

    def __post_init__(self) -> None:
        rows = len(self.ids)
        if not len(self.cached):
            object.__setattr__(self, "cached", np.zeros(rows, np.bool_))
        if (
            self.ids.ndim != 3
            or self.ids.shape != self.weights.shape
            or self.ids.shape[1] != len(self.layers)
        ):
            raise ConfigError(
                f"routing trace: ids {self.ids.shape} and weights {self.weights.shape} must both be"
                f" [rows, {len(self.layers)} layers, experts per token]"
            )
        for name in COLUMNS[2:]:
            if getattr(self, name).shape != (rows,):
                raise ConfigError(
                    f"routing trace: {name} has shape {getattr(self, name).shape} for {rows} rows of ids"
                )
        ends = (int(self.ids.min()), int(self.ids.max())) if self.ids.size else ()
        if wrong := [expert for expert in ends if not 0 <= expert <= self.num_experts]:
            raise ConfigError(
                f"routing trace: it names expert {wrong[0]} and says that there are"
                f" {self.num_experts} (0 to {self.num_experts - 1}; {self.num_experts} for none)"
            )
        if rows and not 0 <= int(self.request.min()) <= int(self.request.max()) < len(self.requests):
            raise ConfigError(f"routing trace: a row's request is none of its {len(self.requests)} requests")

    def __repr__(self) -> str:
        return (
            f"<RoutingCapture {self.origin}: {self.num_rows:,} rows of {len(self.requests)} requests in"
            f" {self.num_steps:,} steps, {len(self.layers)} layers, top-{self.top_k} of"
            f" {self.num_experts} experts>"
        )

    def _repr_html_(self) -> str:
        decoded, cached = self.num_rows - int(self.prefill.sum()), int(self.cached.sum())
        about = {
            "rows": f"{self.num_rows:,} tokens ({decoded:,} of them decoded, {cached:,} cached)"
            f" in {self.num_steps:,} steps",
            "requests": f"{len(self.requests):,}",
            "routing": f"{len(self.layers)} layers, top-{self.top_k} of {self.num_experts} experts",
            "size": byte_words(self.nbytes),
            "model": self.meta.get("model"),
        }
        return html.card(f"routing trace ({self.origin})", html.facts(about), self._load_table())

    def _load_table(self) -> str:
        """Returns a row a layer: how uneven its experts' load is."""
        counts = self.counts().astype(np.float64)
        rows = []
        for layer, load in zip(self.layers[:_MOST_LAYERS], counts, strict=False):
            if not load.sum():
                continue
            top = ", ".join(f"{e} ({100 * load[e] / load.sum():.0f} %)" for e in np.argsort(-load)[:3])
            rows.append([layer, f"{load.max() / load.mean():.2f}", f"{int((load > 0).sum())}", top])
        more = len(self.layers) - _MOST_LAYERS
        return html.table(("layer", "max / mean", "experts visited", "busiest"), rows, right=(0, 1, 2)) + (
            html.note(f"… {more} more layers") if more > 0 else ""
        )

    @property
    def num_rows(self) -> int:
        return self.ids.shape[0]

    @property
    def num_steps(self) -> int:
        """Distinct steps."""
        return len(self.step_starts)

    @property
    def top_k(self) -> int:
        return self.ids.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of the columns."""
        return sum(getattr(self, name).nbytes for name in COLUMNS)

    @functools.cached_property
    def step_starts(self) -> np.ndarray:
        """int64 `[steps]`: each step's first row."""
        if not self.num_rows:
            return np.zeros(0, np.int64)
        return np.flatnonzero(np.r_[True, self.step[1:] != self.step[:-1]])

    def counts(self) -> np.ndarray:
        """Returns int64 `[L, E]`: assignments of each expert that were computed."""
        return count_experts(self.computed().ids, self.num_experts)

    def computed(self) -> "RoutingCapture":
        """Returns the trace without the rows of what was found computed: all work that was done."""
        return self.select(~self.cached) if self.cached.any() else self

    def select(self, rows: np.ndarray) -> "RoutingCapture":
        """Returns the same trace with some of its rows: a mask or rising indices."""
        columns = {name: getattr(self, name)[rows] for name in COLUMNS}
        return dataclasses.replace(self, **columns)

    def phase(self, name: str) -> "RoutingCapture":
        """Returns its "prefill" or its "decode" rows."""
        if name not in ("prefill", "decode"):
            raise ConfigError(f"a routing trace has the phases prefill and decode, not {name!r}")
        return self.select(self.prefill if name == "prefill" else ~self.prefill)

    def of_adapter(self, name: str | None) -> "RoutingCapture":
        """Returns the rows of requests with that LoRA adapter; None: of those without one."""
        return self.select(np.array([r.adapter == name for r in self.requests], np.bool_)[self.request])

    def layer_index(self, layer: int) -> int:
        """Returns the index in the trace of a layer of the model.

        Raises:
            ConfigError: the trace does not have it.
        """
        if layer not in self.layers:
            known = ", ".join(map(str, self.layers))
            raise ConfigError(f"routing trace: it has no layer {layer} (its layers with experts: {known})")
        return self.layers.index(layer)

    def require_rows(self, source: str = "routing trace") -> None:
        """Raises `ConfigError` for a trace without rows."""
        if not self.num_rows:
            raise ConfigError(f"{source}: the trace has no rows; capture some steps first")

    def check_fits(self, config: ModelConfig, source: str = "routing trace") -> None:
        """Raises `ConfigError` unless a model of this configuration could have made it."""
        layers = tuple(i for i, sparse in enumerate(config.moe_layers) if sparse)
        for what, mine, theirs in (
            ("MoE layers", self.layers, layers),
            ("experts", self.num_experts, config.num_experts),
            ("experts per token", self.top_k, config.num_experts_per_tok),
        ):
            if mine != theirs:
                raise ConfigError(
                    f"{source}: it has {in_words(mine)} {what} and the model has {in_words(theirs)};"
                    " use a trace of this model, or one generated for its shape"
                )

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the trace as one .npz, whole or not at all, and returns its path.

        Raises:
            OutputError: it cannot be written.
        """
        header = {
            "schema": SCHEMA,
            "requests": [dataclasses.asdict(request) for request in self.requests],
            "layers": self.layers,
            "num_experts": self.num_experts,
            "origin": self.origin,
            "meta": self.meta,
        }
        text = np.frombuffer(dump_json(header).encode(), np.uint8)
        with atomic_file(path) as file:
            np.savez(file, header=text, **{name: getattr(self, name) for name in COLUMNS})
        return Path(path)


def load_capture(path: str | os.PathLike[str]) -> RoutingCapture:
    """Reads a trace: an .npz file, or the one in a run's folder.

    Raises:
        ConfigError: there is none, it is no trace, or its schema is another version's.
    """
    file = Path(path)
    if file.is_dir():
        file = file / CAPTURE_FILE
        if not file.exists():
            raise ConfigError(f"{path} holds no {CAPTURE_FILE}; run it with engine.capture_routing=true")
    try:
        # Opened here, since numpy leaves a file that is cut off open.
        with open(file, "rb") as opened, np.load(opened, allow_pickle=False) as arrays:
            header = json.loads(arrays["header"].tobytes())
            if header["schema"] not in (1, SCHEMA):
                raise ConfigError(f"{file} has schema {header['schema']}; this moejax reads 1 to {SCHEMA}")
            return RoutingCapture(
                **{name: arrays[name] for name in COLUMNS[: -1 if header["schema"] == 1 else None]},
                requests=tuple(CapturedRequest(**request) for request in header["requests"]),
                layers=tuple(header["layers"]),
                num_experts=header["num_experts"],
                origin=header["origin"],
                meta=header["meta"],
            )
    except FileNotFoundError as error:
        raise ConfigError(f"there is no routing trace {file}") from error
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}") from error
    except (KeyError, TypeError, ValueError, AttributeError, EOFError, zipfile.BadZipFile) as error:
        # numpy takes what is no .npz for a pickle, and advises to trust it.
        pickled = isinstance(error, ValueError) and "pickle" in str(error)
        reason = "no .npz file" if pickled else f"{type(error).__name__}: {error}"
        raise ConfigError(f"{file} is no routing trace of moejax ({reason})") from error


def hash_tokens(tokens: Iterable[int]) -> str:
    """Returns a prompt's identity: sixteen hexadecimal digits over its token ids."""
    return hashlib.blake2b(np.asarray(list(tokens), np.int32).tobytes(), digest_size=8).hexdigest()


def id_dtype(num_experts: int) -> type[np.unsignedinteger[Any]]:
    """Returns the narrowest unsigned type that holds every expert and the mark for none."""
    return np.uint8 if num_experts <= 255 else np.uint16


def count_experts(ids: np.ndarray, num_experts: int) -> np.ndarray:
    """Returns int64 `[L, E]` of ids `[R, L, k]`; the mark for none is not counted."""
    layers = ids.shape[1]
    first = np.arange(layers)[None, :, None] * (num_experts + 1)
    counts = np.zeros(layers * (num_experts + 1), np.int64)
    for row in range(0, len(ids), _COUNTED_ROWS):  # whole traces are large, and int64 is eight times as much
        flat = ids[row : row + _COUNTED_ROWS].astype(np.int64) + first
        counts += np.bincount(flat.reshape(-1), minlength=len(counts))
    return counts.reshape(layers, num_experts + 1)[:, :num_experts]


def in_words(value: object) -> str:
    """Returns a number, or how many and which layers."""
    if isinstance(value, tuple):
        return f"{len(value)}" if value == tuple(range(len(value))) else f"{len(value)} ({list(value)})"
    return str(value)
