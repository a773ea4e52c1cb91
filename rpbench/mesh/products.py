"""Products: which share of a device's rate a matrix product reaches: tiles, waves, alignment, thin and narrow sizes.

Source: NVIDIA, Matrix multiplication background user's guide (tile and wave quantization, alignment).
"""

from functools import lru_cache
from math import ceil

TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.93), (128, 64, 0.75), (64, 64, 0.55))
SPLIT_DEPTH = 2048  # inner values of a part of a split product
SPLIT_COST = 0.97
MAX_SPLIT = 16


@lru_cache(maxsize=65536)
def filled(m: int, n: int, k: int, units: int, batch: int = 1) -> float:
    """Share of the device's units that work on real outputs: the best tile and split of k."""
    best = 0.0
    for rows, columns, rate in TILES:
        tiles = batch * ceil(m / rows) * ceil(n / columns)
        inside = batch * m * n / (tiles * rows * columns)
        waves = _waves(tiles, units)
        split = min(MAX_SPLIT, k // SPLIT_DEPTH)
        if split > 1:
            waves = max(waves, *(SPLIT_COST * _waves(tiles * parts, units) for parts in range(2, split + 1)))
        best = max(best, rate * inside * waves)
    return best


def _waves(tiles: int, units: int) -> float:
    return tiles / (units * ceil(tiles / units))


@lru_cache(maxsize=65536)
def alignment(size: int) -> float:
    """Rate of a product one of whose sizes has only so many powers of two, in 16-bit elements."""
    for multiple, rate in ((64, 1.0), (32, 0.97), (16, 0.94), (8, 0.86), (4, 0.66), (2, 0.5)):
        if size % multiple == 0:
            return rate
    return 0.4


def efficiency(m: int, n: int, k: int, units: int, narrow: float, shallow: float) -> float:
    """Share of the rate of large aligned products: m tokens, n outputs, k inputs."""
    thin = min(m, n)
    return filled(m, n, k, units) * min(alignment(n), alignment(k)) * (k / (k + shallow)) * (thin / (thin + narrow))
