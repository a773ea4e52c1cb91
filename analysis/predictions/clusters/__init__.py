"""Clusters: other people's measured runs on meshes as jobs, constants fitted on the given ones, the others predicted.

python -m analysis.predictions.clusters fit       constants -> conf/software/constants.csv
python -m analysis.predictions.clusters holdout   -> clusters_holdout.csv
python -m analysis.predictions.clusters memory    -> clusters_memory.csv, and a table of docs/predictions.md
python -m analysis.predictions.clusters predict   -> clusters.csv
python -m analysis.predictions.clusters league    -> clusters_league.csv, and a table of docs/second_round.md
python -m analysis.predictions.clusters outcomes  -> sealed_760beda/outcomes.csv, and a table of that page
"""
