"""Checks of a schedule: complete, well placed, free of deadlock, within memory, with the right weight versions."""
