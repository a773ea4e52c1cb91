"""Compiler passes: a schedule in, the same work with transfers, steps or recomputation written out."""
