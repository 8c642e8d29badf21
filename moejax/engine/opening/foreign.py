"""vLLM's keywords of `LLM` that are not ours, each with our equivalent (docs/coming-from-vllm.md)."""

from collections.abc import Iterable

from moejax.core.errors import ConfigError, unknown

EQUIVALENTS = {
    "tensor_parallel_size": "parallel=ParallelConfig(tp=N)",
    "pipeline_parallel_size": "parallel=ParallelConfig(pp=N)",
    "data_parallel_size": "parallel=ParallelConfig(dp=N)",
    "enable_expert_parallel": "parallel=ParallelConfig(ep=N)",
    "quantization": 'quant=QuantConfig(method="rtn", format="int8"); a quantized checkpoint needs none',
    "kv_cache_dtype": 'quant=QuantConfig(kv_cache="int8")',
    "max_model_len": "engine=EngineConfig(max_model_len=N)",
    "max_num_seqs": "engine=EngineConfig(max_num_seqs=N)",
    "max_num_batched_tokens": "engine=EngineConfig(max_num_batched_tokens=N)",
    "block_size": "engine=EngineConfig(block_size=N)",
    "num_gpu_blocks_override": "engine=EngineConfig(num_blocks=N)",
    "gpu_memory_utilization": "engine=EngineConfig(kv_cache_memory_gb=X), of the cache alone",
    "enable_eplb": "engine=EngineConfig(rebalance=RebalanceConfig(every_steps=N)), or LLM.rebalance",
    "enable_chunked_prefill": "nothing: long prompts are always cut into chunks",
    "enable_lora": "engine=EngineConfig(adapters=AdaptersConfig(slots=N)), then LLM.load_adapter",
    "max_loras": "engine=EngineConfig(adapters=AdaptersConfig(slots=N))",
    "max_lora_rank": "engine=EngineConfig(adapters=AdaptersConfig(slots=N, rank=R))",
    "speculative_config": 'engine=EngineConfig(speculation=SpeculationConfig(method="ngram", k=N))',
    "enable_prefix_caching": "engine=EngineConfig(prefix_cache=PrefixCacheConfig(enabled=True))",
    "scheduling_policy": 'engine=EngineConfig(policy="priority"); priorities are in RequestOptions',
    "enforce_eager": "nothing: every step is compiled, see LLM.warmup",
    "trust_remote_code": "nothing: no code of a checkpoint is run",
    "tokenizer": "nothing: it is the model directory's tokenizer.json",
    "disable_log_stats": "nothing: LLM.stats() is asked",
}


def refuse(keyword: str, known: Iterable[str]) -> ConfigError:
    """Returns the error for a keyword that `LLM` does not take: our equivalent of vLLM's, or the nearest."""
    if keyword in EQUIVALENTS:
        return ConfigError(f"LLM({keyword}=) is vLLM's; here it is {EQUIVALENTS[keyword]}")
    return ConfigError(f"LLM: {unknown('keyword', keyword, known)}")
