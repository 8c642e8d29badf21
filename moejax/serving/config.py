"""Settings of the server."""

from dataclasses import dataclass

from moejax.core.checked import Checked, Name, NonNegativeInt, PositiveInt, PositiveNumber
from moejax.core.errors import ConfigError


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
        max_body_bytes: of a request.
        max_time_s: seconds from its arrival after which a request ends with what it has; None: never.
        read_timeout_s, write_timeout_s: seconds within which a body must come, and a chunk be taken.
        drain_s: seconds that running requests have once the server is told to end.
        warmup: compile what requests of any length need before the first one, as a measurement wants it; else
            steps are compiled when they are first met.
    """

    host: Name = "127.0.0.1"
    port: NonNegativeInt = 8000
    name: Name | None = None
    api_keys_file: str | None = None
    admin_keys_file: str | None = None
    max_requests: PositiveInt = 256
    max_samples: PositiveInt = 128
    max_unread: PositiveInt = 4096
    max_body_bytes: PositiveInt = 4_000_000
    max_time_s: PositiveNumber | None = 600.0
    read_timeout_s: PositiveNumber = 10.0
    write_timeout_s: PositiveNumber = 30.0
    drain_s: PositiveNumber = 30.0
    warmup: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.port > 65535:
            raise ConfigError(f"serve.port must be at most 65535, got {self.port}")
