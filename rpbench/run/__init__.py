"""One run, from request to record: a mode is a module of `modes`."""
