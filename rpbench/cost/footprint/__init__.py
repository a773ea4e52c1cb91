"""Bytes on devices and hosts by class of tensor, and what fits."""
