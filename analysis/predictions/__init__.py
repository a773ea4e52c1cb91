"""The paper's tables predicted: throughput, scaling, longest sequence, sequence lengths, cost.

    python -m analysis.predictions            write the tables anew
    python -m analysis.predictions score      targets for errors, against the published 4090 figures
    python -m analysis.predictions outcomes   sealed and present tables beside what came out (--sealed: every cell)
    python -m analysis.predictions refit      fitted and published constants, worked out again
    python -m analysis.predictions holdout    errors with a model, a system or a machine left out of the fits
    python -m analysis.predictions misses     what would explain every cell that is off by more than 15 %

The tables beside this file have the form and the names of `analysis/published/`.
"""
