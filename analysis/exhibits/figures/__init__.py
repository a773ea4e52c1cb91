"""Figures of the paper and around it: each module finds its numbers, draws them and tabulates them."""
