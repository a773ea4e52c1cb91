"""Words to request, nothing else: the groups of `conf/`, composed by Hydra, typed and checked once."""
