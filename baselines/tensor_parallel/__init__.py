"""Matrices cut over devices: all layers, the head alone, or sums hidden behind the other microbatch."""
