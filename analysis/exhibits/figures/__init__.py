"""Figures: each module finds the numbers of a figure, draws and tabulates them."""
