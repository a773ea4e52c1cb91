"""Gradients on their way to the optimizer: added up in a fixed order, over microbatches, devices and replicas."""
