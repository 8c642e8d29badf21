"""Rotary embedding of queries and keys, and the write of keys and values into pages, in one pass."""

import dataclasses

from pallas_kernels.rope_kv_write.api import OP as _OP
from pallas_kernels.rope_kv_write.api import check_slots, rope_kv_write

# Pools are updated in place where they are donated: in a chain of timed calls each call takes the last one's,
# or every call would be timed with a copy of the pools, many times its own bytes.
OP = dataclasses.replace(_OP, carries={"k_pages": 1, "v_pages": 2, "k_scale": 3, "v_scale": 4})

__all__ = ["OP", "check_slots", "rope_kv_write"]
