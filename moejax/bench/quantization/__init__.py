"""`experiments.quantization`: methods compared on one model."""
