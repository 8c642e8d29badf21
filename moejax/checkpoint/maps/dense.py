"""Keys of models without experts."""

from moejax.checkpoint.maps.rules import COMMON, QK_NORM, gated_mlp

_MLP = gated_mlp("model.layers.{l}.mlp", "layers.{l}.mlp", bias=True)

LLAMA_RULES = (*COMMON, *_MLP)
QWEN3_RULES = (*COMMON, *QK_NORM, *_MLP)
