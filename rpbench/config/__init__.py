"""Words to request, nothing else: the groups of `conf/`, composed by Hydra, typed and checked once.

What is refused is a ConfigError, or another ValueError, that names the key, the rule and the way out.
"""
