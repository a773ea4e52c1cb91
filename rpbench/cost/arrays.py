"""Arrays of 64-bit numbers, as costs and plans count and time in them."""

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
