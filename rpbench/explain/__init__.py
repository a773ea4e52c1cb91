"""Explain: why two numbers differ, split into causes that a model of the hardware computes, and the rest."""
