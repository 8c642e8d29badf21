"""Engines that can be given the same workload, ours and its peers, under one interface: `base.Backend`."""
