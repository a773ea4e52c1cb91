"""Weights, optimizer state or activations that live on the host."""
