"""Figures, tables, claims and the report, made from records without torch."""
