"""Expert choice of a router's logits: scores, grouped top-k and weights in one pass."""

from pallas_kernels.topk_router.api import OP, topk_router

__all__ = ["OP", "topk_router"]
