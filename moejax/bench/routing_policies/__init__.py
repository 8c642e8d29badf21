"""The body of `experiments.routing_policies`."""
