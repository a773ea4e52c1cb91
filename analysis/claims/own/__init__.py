"""Our claims: statements on our experiments, accepted values, and consistency of records."""
