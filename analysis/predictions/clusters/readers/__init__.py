"""Readers: rows of published tables as runs; one function for each table."""
