"""Linear programs of a few dozen rows, for bounds: by duality any prices of the rows bound the best value.

    maximise  value . x   where   rows @ x <= limits,  x >= 0,  limits >= 0

The simplex method finds good prices. An early stop or rounding makes a bound loose, never wrong.
Source: Dantzig, "Linear Programming and Extensions", 1963, chapters 5 and 6.
"""

import numpy as np

from rpbench.cost.arrays import Floats
from rpbench.sim.kernels import Array, run

TINY = 1e-9
MOST_PIVOTS = 400


def prices(rows: Floats, limits: Floats, value: Floats) -> Floats:
    """Prices of the rows, (rows,), none below 0: every x within limits b has a value of at most prices . b.

    All are infinite if no prices bound the value.

    Args:
        rows: (rows, variables).
        limits: (rows,), none below 0: prices are best at these limits, and bound the value at all others.
        value: (variables,), none below 0.
    """
    num_rows, num_variables = rows.shape
    table = np.zeros((num_rows + 1, num_variables + num_rows + 1))
    table[:-1, :num_variables], table[:-1, -1] = rows, np.maximum(limits, 0)
    table[:-1, num_variables:-1] = np.eye(num_rows)
    table[-1, :num_variables] = -value
    run(_pivot, table, MOST_PIVOTS)
    return _sound(np.maximum(table[-1, num_variables:-1], 0), rows, value)


def _pivot(table: Array, most: int) -> None:
    """Pivot, at most so often, until no variable has a value that the prices do not pay."""
    last, width = len(table) - 1, len(table[0])
    for _ in range(most):
        column = 0
        for j in range(width - 1):
            if table[last][j] < table[last][column]:
                column = j
        if table[last][column] >= -TINY:
            return
        row, least = -1, 0.0
        for i in range(last):
            if table[i][column] > TINY:
                ratio = table[i][width - 1] / table[i][column]
                if row < 0 or ratio < least:
                    row, least = i, ratio
        if row < 0:
            return
        pivot = table[row][column]
        for j in range(width):
            table[row][j] /= pivot
        for i in range(last + 1):
            factor = table[i][column]
            if i != row and factor != 0:
                for j in range(width):
                    table[i][j] -= factor * table[row][j]


def _sound(found: Floats, rows: Floats, value: Floats) -> Floats:
    """The prices, raised until the rows price every variable at its value or more."""
    paid = found @ rows
    wanted = value > 0
    if (paid[wanted] <= 0).any() or (paid[~wanted] < -TINY * max(1.0, float(np.abs(found).max(initial=0)))).any():
        return np.full(len(rows), np.inf)
    return found * max(1.0, float((value[wanted] / paid[wanted]).max(initial=0)))
