"""Modules whose matrices are cut over devices: decoder layers, embedding, head and loss."""
