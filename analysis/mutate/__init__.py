"""Mutation check of the evidence: which falsified values in records, manifests and tables are noticed?"""
