"""Mutation check of the evidence: which falsified values in records, manifests and tables are noticed?"""

from analysis.mutate.check import Mutant, Outcome, check, mutants, of_statements, sampled

__all__ = ["Mutant", "Outcome", "check", "mutants", "of_statements", "sampled"]
