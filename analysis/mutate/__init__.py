"""Mutation check of the evidence: records, manifests and tables are falsified one value at a time; who notices?"""

from analysis.mutate.check import Mutant, Outcome, check, mutants, of_statements, sampled

__all__ = ["Mutant", "Outcome", "check", "mutants", "of_statements", "sampled"]
