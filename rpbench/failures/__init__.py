"""Failures: the work that a run loses when ranks die, the time to recover, and the pace afterwards; no tensors."""
