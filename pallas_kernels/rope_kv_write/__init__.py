"""Norm and rotary embedding of queries and keys, and the write of keys and values into pages, in one pass."""

from pallas_kernels.rope_kv_write.api import OP, rope_kv_write

__all__ = ["OP", "rope_kv_write"]
