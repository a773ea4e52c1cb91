"""Figures of our own studies."""
