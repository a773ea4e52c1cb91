"""Rows of published tables as sides of `rpbench explain`, and tested explanations of pairs of them.

python -m analysis.explained.pairs      pairs.csv -> explained.csv
"""
