"""The simulation experiment: an engine on GPUs that are not here, under a workload, with the error of it all.

layouts and rates → replicas on a virtual clock (`replicas`) → rows with intervals (`run`) → table, plot.
How wrong it may be is measured on tables, published results and this machine (`mode=validate`).
"""
