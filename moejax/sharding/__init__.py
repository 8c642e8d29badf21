"""Meshes, the rules that place tensors on them, and collectives over their axes."""
