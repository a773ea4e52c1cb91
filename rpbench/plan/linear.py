"""Linear programs of a few dozen rows, for bounds: by duality any prices of the rows bound the best value.

    maximise  value . x   where   rows @ x <= limits,  x >= 0,  limits >= 0

The simplex method finds good prices. An early stop or rounding makes a bound loose, never wrong.
Source: Dantzig, "Linear Programming and Extensions", 1963, chapters 5 and 6.
"""

import numpy as np

from rpbench.cost.arrays import Floats

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
    for _ in range(MOST_PIVOTS):
        column = int(table[-1, :-1].argmin())
        if table[-1, column] >= -TINY:
            break
        entering = table[:-1, column]
        usable = entering > TINY
        if not usable.any():
            break
        ratios = np.where(usable, table[:-1, -1] / np.where(usable, entering, 1), np.inf)
        row = int(ratios.argmin())
        table[row] /= table[row, column]
        factors = table[:, column].copy()
        factors[row] = 0
        table -= np.outer(factors, table[row])
    return _sound(np.maximum(table[-1, num_variables:-1], 0), rows, value)


def _sound(found: Floats, rows: Floats, value: Floats) -> Floats:
    """The prices, raised until the rows price every variable at its value or more."""
    paid = found @ rows
    wanted = value > 0
    if (paid[wanted] <= 0).any() or (paid[~wanted] < -TINY * max(1.0, float(np.abs(found).max(initial=0)))).any():
        return np.full(len(rows), np.inf)
    return found * max(1.0, float((value[wanted] / paid[wanted]).max(initial=0)))
