"""Checks of a schedule: complete, well placed, free of deadlock, within memory, with the right weight versions.

A check raises a ScheduleError that names the first action that breaks its rule.
"""
