"""Records in, figures, tables, claims and the report out. No torch; nothing is computed that a record could hold."""
