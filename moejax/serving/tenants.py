"""Tenants of a server: whose key a request carries, what it may ask for, and what it has had.

A file of keys has one a line, all of one tenant without a name; or, where its name ends in ".toml", a table
for each tenant:

    [gold]
    keys = ["sk-1", "sk-2"]
    weight = 4                  # `Tenant`'s fields are the engine's scheduler's: what is over them waits
    requests_per_minute = 600   # the server's own: what is over them is refused
    tokens_per_minute = 200_000

It knows nothing of HTTP. No JAX here.
"""

import contextlib
import math
import time
import tomllib
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from moejax.core.checked import PositiveInt
from moejax.core.config import EngineConfig
from moejax.core.errors import ConfigError, MoejaxError, RequestError, unknown
from moejax.core.scheduling import Tenant
from moejax.core.words import one_line
from moejax.engine.recent import EDGES
from moejax.engine.requests.api import RequestOptions, RequestOutput

MOST_LABELS = 100  # of a tenant's own in metrics, by their order in the file; the others are "other"


@dataclass(frozen=True)
class ServedTenant(Tenant, section="tenant"):
    """A tenant of a server. To `Tenant`'s fields come these; each prompt of a body is a request.

    Attributes:
        slo_class: of all its requests; None leaves it to them.
        max_requests: at a time.
        requests_per_minute, tokens_per_minute: within any minute, by the requests' arrivals. A request counts
            as its prompt and all tokens that it may generate until it ends, and then as those it has.
    """

    slo_class: str | None = None
    max_requests: PositiveInt | None = None
    requests_per_minute: PositiveInt | None = None
    tokens_per_minute: PositiveInt | None = None


class QuotaExceeded(RequestError):
    """A request over its tenant's quota, which may come again after `retry_s` seconds."""

    def __init__(self, message: str, retry_s: int) -> None:
        super().__init__(message)
        self.retry_s = retry_s


class Window:
    """Amounts of the last minute: a sliding log, so that no minute ever has more than it may."""

    def __init__(self) -> None:
        self._entries = deque[list[float]]()

    def add(self, amount: float, now: float) -> list[float]:
        """Counts an amount, `now` in seconds; returns [now, amount], whose amount may be changed later."""
        self._entries.append([now, amount])
        return self._entries[-1]

    def wait_s(self, amount: float, most: float, now: float) -> float:
        """Returns seconds until an amount, itself at most `most`, fits beside the others; 0 where it does."""
        while self._entries and self._entries[0][0] <= now - 60.0:
            self._entries.popleft()
        over, wait = amount - most + sum(had for _, had in self._entries), 0.0
        for instant, had in self._entries:
            if over > 0:
                over, wait = over - had, instant + 60.0 - now
        return wait


@dataclass
class Stats:
    """Sums for metrics: requests let in, and refused by quota; tokens by kind; times to the first token by
    the buckets of `EDGES`."""

    admitted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    ttft: np.ndarray = field(default_factory=lambda: np.zeros(len(EDGES["ttft"]) + 1, np.int64))
    ttft_s: float = 0.0

    def count(self, output: RequestOutput) -> tuple[int, int]:
        """Takes in a request that has ended; returns its tokens of prompt and of output."""
        prompt, made = len(output.prompt_token_ids), sum(len(sample.token_ids) for sample in output.outputs)
        self.tokens.update(prompt=prompt, generation=made)
        if output.metrics.token_times:
            self.ttft[np.searchsorted(EDGES["ttft"], output.metrics.ttft)] += 1
            self.ttft_s += output.metrics.ttft
        return prompt, made


@dataclass
class Account:
    """A tenant's quotas and what it has had of them."""

    tenant: ServedTenant
    stats: Stats
    running: int = 0
    requests: Window = field(default_factory=Window)
    tokens: Window = field(default_factory=Window)


class Tenants:
    """The tenants of a file of keys.

    Args:
        path: None: one tenant without a name, and no key is asked for.
        clock: seconds.

    Attributes:
        keys: key → tenant; None where none is asked for.
        stats: by the label in metrics.

    Raises:
        ConfigError: the file cannot be read, has no key, one key twice, or a field that is wrong.
    """

    def __init__(self, path: str | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.path, self.clock = path, clock
        if path is not None and path.endswith(".toml"):
            self.keys, tenants = _read_tables(path)
        else:
            self.keys, tenants = read_keys("api_keys_file", path), {"": ServedTenant()}
        self.stats: dict[str, Stats] = {}
        self.accounts: dict[str, Account] = {}
        for name, tenant in tenants.items():
            label = name if len(self.stats) < MOST_LABELS else "other"
            self.accounts[name] = Account(tenant, self.stats.setdefault(label, Stats()))

    def engine(self, engine: EngineConfig) -> EngineConfig:
        """Returns the engine's settings with these tenants in `engine.scheduling.tenants`. Raises
        `ConfigError` where one is there already, or asks for what the engine does not do."""
        known = engine.scheduling
        tenants = {name: account.tenant for name, account in self.accounts.items() if name}
        for name, tenant in tenants.items():
            where = f"serve.api_keys_file={self.path}: [{name}]"
            if name in known.tenants:
                raise ConfigError(f"{where}: engine.scheduling.tenants.{name} is set, too; leave one out")
            if tenant.slo_class is not None and tenant.slo_class not in known.slo_classes:
                raise ConfigError(f"{where}: {unknown('slo_class', tenant.slo_class, known.slo_classes)}")
            if tenant.weight != 1 and engine.policy != "fair":
                raise ConfigError(f"{where}: weight counts under engine.policy=fair alone; set that")
            if tenant.isolated and engine.speculation.method == "suffix":
                raise ConfigError(f"{where}: isolated, but engine.speculation.method=suffix drafts from all")
        return replace(engine, scheduling=replace(known, tenants={**known.tenants, **tenants}))

    def options(self, name: str, asked: RequestOptions) -> RequestOptions:
        """Returns a request's options as its tenant's; raises `RequestError` for a class that is not its."""
        own = self.accounts[name].tenant.slo_class
        if own is not None and asked.slo_class not in (None, own):
            raise RequestError(f"slo_class is {own!r} for this key; leave it out")
        return replace(asked, tenant=name, slo_class=own or asked.slo_class)

    @contextlib.contextmanager
    def charged(
        self, name: str, requests: int, tokens: Callable[[], int], drawn: float = 1.0
    ) -> Iterator[list[RequestOutput]]:
        """Charges a tenant for requests, which run until the end of the context; yields the list to put their
        outputs into as they begin.

        Args:
            tokens: counts all that they may come to; asked only where there is a quota of them.
            drawn: samples drawn for each that their outputs have.

        Raises:
            QuotaExceeded: over a quota now; nothing has been charged.
            RequestError: more than a quota ever allows.
        """
        account, now = self.accounts[name], self.clock()
        tenant, stats = account.tenant, account.stats
        whole = tokens() if tenant.tokens_per_minute is not None else 0
        for key, amount, waits in (
            ("max_requests", requests, lambda n, most: float(account.running + n > most)),
            ("requests_per_minute", requests, lambda n, most: account.requests.wait_s(n, most, now)),
            ("tokens_per_minute", whole, lambda n, most: account.tokens.wait_s(n, most, now)),
        ):
            if (most := getattr(tenant, key)) is None:
                continue
            if amount > most:
                raise RequestError(f"a body counts as {amount}, over {key}={most} of this key; ask for less")
            if (wait := math.ceil(waits(amount, most))) > 0:
                stats.refused[key] += requests
                raise QuotaExceeded(f"over {key}={most} of this key; try again in {wait} s", wait)
        if tenant.requests_per_minute is not None:
            account.requests.add(requests, now)
        charge = account.tokens.add(whole, now) if whole else [now, 0]
        account.running += requests
        stats.admitted += requests
        outputs = list[RequestOutput]()
        try:
            yield outputs
        finally:
            account.running -= requests
            counts = [stats.count(output) for output in outputs]
            charge[1] = sum(prompt + made * drawn for prompt, made in counts)


def read_keys(field: str, path: str | None) -> dict[bytes, str] | None:
    """Returns the keys of a file with one a line, of a tenant without a name; None without a file. Raises
    `ConfigError` where it cannot be read or has none."""
    if path is None:
        return None
    keys = [line.strip().encode() for line in _read(field, path).split("\n") if line.strip()]
    if not keys:
        raise ConfigError(f"serve.{field}={path} has no key; write one a line, or leave the setting out")
    return dict.fromkeys(keys, "")


def _read(field: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"serve.{field}={path}: cannot be read ({error})") from None


def _read_tables(path: str) -> tuple[dict[bytes, str] | None, dict[str, ServedTenant]]:
    """Returns key → tenant, and tenants by name."""
    text, place = _read("api_keys_file", path), ""
    keys, tenants = dict[bytes, str](), dict[str, ServedTenant]()
    try:
        for name, table in (tomllib.loads(text) or {"NAME": {}}).items():
            place = f"[{name}]: "
            if not (name and isinstance(table, dict)):
                raise ConfigError("it must be a table with a name")
            own = table.pop("keys", None)
            if not (own and isinstance(own, list) and all(isinstance(k, str) and k.strip() for k in own)):
                raise ConfigError('keys must be a list of texts such as ["KEY"]')
            for key in own:
                if keys.setdefault(key.strip().encode(), name) != name:
                    raise ConfigError("a key of it is another tenant's, too")
            tenants[name] = ServedTenant(**table)
    except (tomllib.TOMLDecodeError, MoejaxError) as error:
        raise ConfigError(f"serve.api_keys_file={path}: {place}{one_line(error)}") from None
    return keys, tenants
