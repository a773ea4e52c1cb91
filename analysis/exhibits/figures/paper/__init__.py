"""Figures of the paper: as published, simulated again, and predicted."""
