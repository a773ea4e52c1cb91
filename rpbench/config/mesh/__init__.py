"""The mesh of a request: the keys under `mesh`, what they stand on, and what they exclude."""
