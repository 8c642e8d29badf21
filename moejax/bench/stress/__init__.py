"""The stress experiment: what an engine does not show in a calm measurement."""
