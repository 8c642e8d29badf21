"""Named shapes of `grouped_swiglu`: gate and up projections of each model's experts."""

from pallas_kernels.group_specs import CASES, swiglu_spec

SPECS = tuple(swiglu_spec(*case) for case in CASES)
