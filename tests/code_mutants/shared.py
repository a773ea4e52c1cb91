"""Faults in code that the engine and the reference of `verify` share: both would go wrong alike, and agree.

Each is held by a test that makes the same by hand, with plain torch.
"""

from .mutants import Mutant
from .reach import ROOT

_BY_HAND = "tests/engine/test_independent_training.py::"
_TRAINED = [
    f"{_BY_HAND}test_weights_and_losses_are_those_of_plain_torch[0-factors0]",
    f"{_BY_HAND}test_weights_and_losses_are_those_of_plain_torch[2-factors1]",
]
_BATCHES = [f"{_BY_HAND}test_every_microbatch_of_every_step_is_another_one_whose_labels_follow_its_tokens"]
_WORKLOAD, _OPTIMIZER = "rpbench/engine/workload.py", "rpbench/engine/state/updates/optimizer.py"
_DATA = "rpbench/models/data.py"
_ADAM = "torch.optim.AdamW(parameters, lr=1.0, weight_decay=self.weight_decay, fused=True)"
_FAULTS = (
    ("loss share", _WORKLOAD, "Workload.share", "loss / self.num_microbatches", "loss / (self.num_microbatches + 1)"),
    ("learning rate", _OPTIMIZER, "OptimizerSettings.rate", "self.learning_rate * min", "2 * self.learning_rate * min"),
    ("warm-up", _OPTIMIZER, "OptimizerSettings.rate", "version / (self", "(version - 1) / (self"),
    ("betas", _OPTIMIZER, "OptimizerSettings.make", _ADAM, _ADAM.replace("lr", "betas=(0.9, 0.99), lr")),
    ("repeated data", _WORKLOAD, "Workload.absolute", " + microbatch", " + microbatch % self.num_microbatches"),
    ("unshifted labels", _DATA, "_shifted", "rows[:, 1:]", "rows[:, :-1]"),
)


def faults() -> list[tuple[Mutant, list[str]]]:
    """Each fault, and the tests that hold it."""
    return [
        (_mutant(*fault), _BATCHES if fault[0] in ("repeated data", "unshifted labels") else _TRAINED)
        for fault in _FAULTS
    ]


def nothing() -> Mutant:
    """No fault at all: what it fails, fails for another reason."""
    return _mutant(
        "nothing", _WORKLOAD, "Workload.share", "loss / self.num_microbatches", "loss / self.num_microbatches"
    )


def _mutant(kind: str, file: str, function: str, old: str, new: str) -> Mutant:
    source = (ROOT / file).read_bytes()
    begin = source.index(old.encode(), source.index(f"def {function.split('.')[-1]}(".encode()))
    line = source[:begin].count(b"\n") + 1
    return Mutant(file, function, kind, old, new, 0, line, line, (begin, begin + len(old.encode())))
