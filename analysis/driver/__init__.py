"""The driver of a reproduction: sweeps, notebooks, figures, claims, report."""
