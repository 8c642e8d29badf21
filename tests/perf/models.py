"""Models and layouts whose communication and memory the tests count."""

from moejax.core.config import ModelConfig
from moejax.core.parallel import ParallelConfig


def small_model(**changes: object) -> ModelConfig:
    """Two layers of experts and one dense, sizes that divide by eight and differ from each other."""
    config = ModelConfig(
        family="qwen2_moe",
        vocab_size=96,
        hidden_size=40,
        num_layers=3,
        num_heads=8,
        num_kv_heads=4,
        head_dim=6,
        num_experts=16,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        intermediate_size=56,
        moe_layers=(True, False, True),
        sliding_windows=(None, None, None),
        max_position_embeddings=64,
        shared_expert_intermediate_size=72,
        qkv_bias=True,
    )
    return config.replace(**changes)


LAYOUTS = {
    "single": ParallelConfig(),
    "tp8": ParallelConfig(tp=8),
    "ep8": ParallelConfig(ep=8),
    "ep4_tp2": ParallelConfig(ep=4, tp=2),
    "dp_attention_ep8": ParallelConfig(ep=8, attention="data"),
    "dp_attention_ep4_tp2": ParallelConfig(ep=4, tp=2, attention="data"),
    "dp2_ep2_tp2": ParallelConfig(dp=2, ep=2, tp=2),
    "pp2_ep4": ParallelConfig(pp=2, ep=4),
    "two_nodes": ParallelConfig(ep=8, nodes=2, attention="data"),
    "four_nodes": ParallelConfig(ep=4, tp=2, nodes=4, attention="data"),
    "replicas": ParallelConfig(ep=4, tp=2, redundant_experts=4, attention="data"),
}
