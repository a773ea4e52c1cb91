"""Tables that stand without a figure, and how tables are written to files."""
