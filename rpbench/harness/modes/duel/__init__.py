"""The duel: every contender in real time on this machine, in turn, on the same work."""

from rpbench.harness.modes.duel.run import records
