"""Pipelines that flush before every step, their backward whole: GPipe, 1F1B and its relatives."""
