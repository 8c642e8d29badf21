"""The scaling experiment: one model on many layouts, modelled for GPUs and measured on virtual devices."""
