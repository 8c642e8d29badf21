"""The body of `experiments.offload`."""
