"""Recorded choices of routers: the trace format, generators, and analyses. Numpy only."""
