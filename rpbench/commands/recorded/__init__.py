"""Verbs that read records: compare, explain, export, import, pivot, query."""
