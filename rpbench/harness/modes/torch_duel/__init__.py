"""The torch duel: our threads, torch's runtime with our table, and torch's own schedule of the same name, in turn."""

from rpbench.harness.modes.torch_duel.run import records
