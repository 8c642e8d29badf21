"""The operations by name. Importing one imports only its own modules."""

import importlib

from pallas_kernels.op import Op

OPS = (
    "ragged_paged_attention",
    "flash_attention",
    "grouped_matmul",
    "grouped_swiglu",
    "quantized_grouped_matmul",
    "quantized_grouped_swiglu",
    "quantized_matmul",
    "topk_router",
    "moe_permute",
    "moe_combine",
    "rms_norm",
    "rope_kv_write",
)


def load_op(name: str) -> Op:
    """Returns the operation `pallas_kernels.<name>.OP`.

    Raises:
        KeyError: unknown; the message lists what there is.
    """
    if name not in OPS:
        raise KeyError(f"unknown kernel {name!r}; known: {', '.join(OPS)}")
    return importlib.import_module(f"pallas_kernels.{name}").OP
