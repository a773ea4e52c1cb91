"""Mutation check of the evidence: records are falsified one value at a time, and the claims must see it."""

from analysis.mutate.check import Outcome, check
from analysis.mutate.mutants import Mutant, mutants

__all__ = ["Mutant", "Outcome", "check", "mutants"]
