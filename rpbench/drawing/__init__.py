"""Timelines as pictures: a figure of matplotlib, or an SVG written as text."""
