"""Pipelines in both directions through the same ranks, and waves that turn at the ends."""
