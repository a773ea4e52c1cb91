"""What `rpbench new` takes. A module of its own, so that `--help` does not import what the verb needs."""

USAGE = "new model|cluster|gpu|schedule NAME"
