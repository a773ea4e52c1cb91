"""Models cut over devices: replicas with shards, matrices and heads in shards, and the collectives between them."""
