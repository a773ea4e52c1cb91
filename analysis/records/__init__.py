"""Records and published numbers as tables."""
