"""Seconds of one layer on one device of a mesh: kernels and the collectives inside."""
