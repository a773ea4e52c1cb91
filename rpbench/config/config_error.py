"""ConfigError: what a request that cannot be understood is answered with."""


class ConfigError(ValueError):
    """A request that cannot be understood: unknown names, misspelt keys, values of the wrong type."""
