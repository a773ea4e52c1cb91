"""Pipelines that are never flushed: weights are stashed, foretold or stale."""
