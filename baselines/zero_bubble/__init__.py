"""Backward cut in two, so that weight gradients fill bubbles."""
