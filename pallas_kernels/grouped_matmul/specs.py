"""Named shapes of `grouped_matmul`: each model's down projection, scaled by routing weights."""

from pallas_kernels.group_specs import CASES, down_spec

SPECS = tuple(down_spec(*case) for case in CASES)
