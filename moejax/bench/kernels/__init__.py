"""`experiments.kernels`: static report, times beside other implementations, tuning."""
