"""Pipelines that are never flushed: weights are stashed, predicted or stale."""
