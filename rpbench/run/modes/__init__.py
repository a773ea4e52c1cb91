"""Modes: what a run is for. Each module turns a request into records."""
