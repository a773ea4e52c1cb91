"""Seconds and bytes of an action, from constants, published timings, profiles or a model of the hardware."""
