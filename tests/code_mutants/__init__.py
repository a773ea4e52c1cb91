"""Faults put into the code one by one, to see whether the default suite notices: `python -m tests.code_mutants`."""
