"""Settings of the server."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from moejax.core.checked import Among, Checked, Name, NonNegativeInt, PositiveInt, PositiveNumber
from moejax.core.errors import ConfigError, refuse, unknown
from moejax.simulate.routers import ROUTERS


@dataclass(frozen=True)
class ServeSection(Checked, section="serve"):
    """Where the server listens, who may ask, and how much of it.

    Attributes:
        host, port: address; port 0 takes any that is free.
        name: what requests call the model; None: the folder's name. LoRA adapters go by their own.
        api_keys_file: one key a line, of which requests must carry one, or, in a file NAME.toml, tenants with
            theirs (`moejax.serving.tenants`); None: none is asked for.
        admin_keys_file: one key a line, for `/admin/…`, which is not there without it.
        max_requests: requests at a time; more are told to come again (429).
        max_samples: of one prompt (`n`, `best_of`).
        max_unread: chunks that a stream's reader may lag behind.
        stream_interval: steps of its samples that a stream gathers before it tells of them, as vLLM has
            it; its first and last tokens come at once. Beside a small model's steps each telling has a cost.
        max_body_bytes: of a request.
        max_time_s: seconds from its arrival after which a request ends with what it has; None: never.
        read_timeout_s, write_timeout_s: seconds within which a body must come, and a chunk be taken.
        drain_s: seconds that running requests have once the server is told to end.
        warmup: compile what requests of any length need before the first one, as a measurement wants it:
            greedy ones and ones with a temperature alone. All else is compiled when it is first met.
        models: name → overrides of the command line (`serve.models.NAME=[model=tiny]`): several models,
            opened when they are first asked for.
        split: name of one of them → its share of the requests for `name`, which then names no model itself.
        memory_gb: 10^9 bytes of a device that they may take together; None: all may be open.
        wait_s: seconds that a request waits at most until its model finds room beside those that run.
        replicas: engines in processes of their own, by Ray Serve, and router: which of them gets a request.
        max_replicas: their number grows up to this, from `replicas` on, so that requests wait for at most
            `queue_ms` before their first step; 0: it stays.
        retries: replicas after the first one that a request is given to, while none gets on with it.
        failures, rest_s: a replica that fails so often in a row gets no request for so many seconds.
    """

    host: Name = "127.0.0.1"
    port: NonNegativeInt = 8000
    name: Name | None = None
    api_keys_file: str | None = None
    admin_keys_file: str | None = None
    max_requests: PositiveInt = 256
    max_samples: PositiveInt = 128
    max_unread: PositiveInt = 4096
    stream_interval: PositiveInt = 1
    max_body_bytes: PositiveInt = 4_000_000
    max_time_s: PositiveNumber | None = 600.0
    read_timeout_s: PositiveNumber = 10.0
    write_timeout_s: PositiveNumber = 30.0
    drain_s: PositiveNumber = 30.0
    warmup: bool = False
    models: dict[str, list[str]] = field(default_factory=dict)
    split: dict[str, float] = field(default_factory=dict)
    memory_gb: PositiveNumber | None = None
    wait_s: PositiveNumber = 30.0
    replicas: PositiveInt = 1
    router: Annotated[str, Among(ROUTERS, "router")] = "least_loaded"
    max_replicas: NonNegativeInt = 0
    queue_ms: PositiveNumber = 500.0
    retries: NonNegativeInt = 2
    failures: PositiveInt = 3
    rest_s: PositiveNumber = 30.0

    @property
    def replicated(self) -> bool:
        """Whether Ray Serve runs the engines."""
        return max(self.replicas, self.max_replicas) > 1

    @property
    def limits(self) -> dict[str, int]:
        """Those of an `AsyncLLM`."""
        names = ("max_requests", "max_unread", "stream_interval")
        return {name: getattr(self, name) for name in names}

    def __post_init__(self) -> None:
        super().__post_init__()
        if 0 < self.max_replicas < self.replicas:
            raise ConfigError(
                f"serve.max_replicas={self.max_replicas} is below serve.replicas={self.replicas}"
            )
        named = self.name if not self.split else None
        refuse("serve.models", bool(self.models), {"serve.replicas": self.replicated, "serve.name": named})
        if self.split:
            if reason := bad_weights(self.split, self.models):
                raise ConfigError(f"serve.split: weights {reason}; its versions are of serve.models")
            if self.name is None or self.name in self.models:
                raise ConfigError("serve.split needs serve.name, what requests call all of them together")
        if self.stream_interval > self.max_unread:
            raise ConfigError(
                f"serve.stream_interval={self.stream_interval} is over serve.max_unread={self.max_unread}"
            )
        if self.port > 65535:
            raise ConfigError(f"serve.port must be at most 65535, got {self.port}")


def bad_weights(weights: Any, known: Iterable[str]) -> str | None:
    """Returns what is wrong with name → share."""
    if not isinstance(weights, Mapping) or not weights:
        return "must be version → share"
    if strange := [name for name in weights if name not in known]:
        return f"have an {unknown('version', str(strange[0])[:100], known)}"
    shares = list(weights.values())
    numbers = all(isinstance(share, (int, float)) and not isinstance(share, bool) for share in shares)
    if not numbers or not all(0 <= share < math.inf for share in shares) or not sum(shares):
        return f"must be at least 0, and one above 0, got {', '.join(map(str, shares))[:100]}"
    return None
