"""Explained: rows of published tables as sides of `rpbench explain`, and pairs of them whose difference tests hold.

python -m analysis.explained.pairs      pairs.csv -> explained.csv: what is explained of every pair, and what is not
"""
