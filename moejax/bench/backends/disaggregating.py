"""Our engine in two, one of which computes prompts."""

from typing import Any

from moejax.bench.backends.config import BackendOptions
from moejax.bench.backends.moejax import MoejaxBackend
from moejax.cache.pool import block_bytes
from moejax.core.config import EngineConfig
from moejax.core.errors import ConfigError
from moejax.engine.disaggregated import Disaggregated
from moejax.engine.llm import LLM


class DisaggregatingBackend(MoejaxBackend):
    """`llm` is a `Disaggregated` with the engine that decodes; steps that are counted are that one's."""

    def __init__(self, decode: LLM, options: BackendOptions) -> None:
        more = {"parallel": options.disaggregate_to, "engine": decode.engine_config}
        given: dict[str, Any] = decode.arguments | more
        prefill = given if options.disaggregate == "process" else LLM(**given)
        pair: Any = Disaggregated(prefill, decode, timeout_s=options.timeout_s)
        super().__init__(pair)

    def beside(self, engine: EngineConfig) -> MoejaxBackend:
        raise ConfigError("backend.disaggregate is for a variant beside a baseline without it (ab.variants)")


def disaggregated_rows(backends: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns a row for each variant of two engines: requests, and bytes beside those by formula."""
    rows = []
    for name, backend in backends.items():
        if isinstance(backend, DisaggregatingBackend):
            llm: Any = backend.llm
            size = block_bytes(llm.config, llm.engine_config.block_size, llm.kv_cache_dtype)
            told = ("handed_over", "decode_only", "recomputed", "lost_peers")
            sent = {"kv_sent_bytes": llm.counts["bytes"], "kv_formula_bytes": llm.counts["blocks"] * size}
            rows.append({"variant": name, **{key: llm.counts[key] for key in told}, **sent})
    return rows
