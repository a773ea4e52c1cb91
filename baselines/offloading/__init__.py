"""Weights, optimizer state or activations at home on the host."""
