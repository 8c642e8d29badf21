"""`experiments.quantization`: methods compared on one model; and the speed of GPTQ's core (`gptq_speed`)."""
