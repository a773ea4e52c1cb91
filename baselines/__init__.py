"""Methods that RoundPipe is compared with, one per file; README.md lists paper and ours side by side.

A generator raises ValueError for a shape or an option that its method does not take.
"""
