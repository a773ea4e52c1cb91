"""Failures: what a run loses when ranks die, how long it takes to go on, and the pace afterwards; no tensors."""
