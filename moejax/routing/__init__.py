"""What routers chose, recorded: the format, generators, and what can be read from it. Numpy only."""
