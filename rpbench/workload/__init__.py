"""Workloads: descriptions of transformers, and readers of such descriptions."""
