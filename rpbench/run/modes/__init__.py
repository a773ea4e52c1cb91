"""Modes: what a run is for. Each module prepares the work of a request (`prepare`), or makes its `records`."""
