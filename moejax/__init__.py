"""moejax: inference experiments on mixture-of-experts transformers in JAX."""

from typing import TYPE_CHECKING, Any

from moejax.core.version import __version__

if TYPE_CHECKING:
    from moejax.checkpoint.hf import load_pretrained, save_pretrained
    from moejax.core.adapters import AdaptersConfig
    from moejax.core.config import EngineConfig, ModelConfig, PrefixCacheConfig
    from moejax.core.moe import MoeConfig
    from moejax.core.parallel import ParallelConfig
    from moejax.core.quant import QuantConfig
    from moejax.core.scheduling import (
        AdaptiveBatchingConfig,
        RebalanceConfig,
        SchedulingConfig,
        SloClass,
        SpeculationConfig,
        Tenant,
    )
    from moejax.core.tiers import ExpertsConfig, TiersConfig
    from moejax.engine.llm import LLM
    from moejax.engine.requests.api import Checkpoint, RequestOptions, RequestOutput, SamplingParams
    from moejax.engine.search import BeamSearchParams, beam_search
    from moejax.serving.async_llm import AsyncLLM

_HOMES = {
    "LLM": "moejax.engine.llm",
    "AsyncLLM": "moejax.serving.async_llm",
    "SamplingParams": "moejax.engine.requests.api",
    "RequestOutput": "moejax.engine.requests.api",
    "RequestOptions": "moejax.engine.requests.api",
    "Checkpoint": "moejax.engine.requests.api",
    "BeamSearchParams": "moejax.engine.search",
    "beam_search": "moejax.engine.search",
    "load_pretrained": "moejax.checkpoint.hf",
    "save_pretrained": "moejax.checkpoint.hf",
    "AdaptersConfig": "moejax.core.adapters",
    "ModelConfig": "moejax.core.config",
    "MoeConfig": "moejax.core.moe",
    "EngineConfig": "moejax.core.config",
    "PrefixCacheConfig": "moejax.core.config",
    "ParallelConfig": "moejax.core.parallel",
    "QuantConfig": "moejax.core.quant",
    "RebalanceConfig": "moejax.core.scheduling",
    "AdaptiveBatchingConfig": "moejax.core.scheduling",
    "SchedulingConfig": "moejax.core.scheduling",
    "SloClass": "moejax.core.scheduling",
    "SpeculationConfig": "moejax.core.scheduling",
    "Tenant": "moejax.core.scheduling",
    "ExpertsConfig": "moejax.core.tiers",
    "TiersConfig": "moejax.core.tiers",
}

__all__ = [
    "LLM",
    "AdaptersConfig",
    "AdaptiveBatchingConfig",
    "AsyncLLM",
    "BeamSearchParams",
    "Checkpoint",
    "EngineConfig",
    "ExpertsConfig",
    "ModelConfig",
    "MoeConfig",
    "ParallelConfig",
    "PrefixCacheConfig",
    "QuantConfig",
    "RebalanceConfig",
    "RequestOptions",
    "RequestOutput",
    "SamplingParams",
    "SchedulingConfig",
    "SloClass",
    "SpeculationConfig",
    "Tenant",
    "TiersConfig",
    "__version__",
    "beam_search",
    "load_pretrained",
    "save_pretrained",
]


def __getattr__(name: str) -> Any:
    # Imported at first use, so that `import moejax.core` and the host-only parts do not start JAX.
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'moejax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
