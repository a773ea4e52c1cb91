"""Seeds for things that must not depend on the order in which they are drawn."""

import hashlib

import torch


def generator_for(*parts: int | str) -> torch.Generator:
    """A generator on the CPU whose numbers depend on `parts` alone, e.g. `generator_for("weights", seed, layer)`."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
