"""Exhibits: the figures and tables of the report, each made from records."""
