"""Methods that RoundPipe is compared with, one per file; README.md lists paper and ours side by side."""
