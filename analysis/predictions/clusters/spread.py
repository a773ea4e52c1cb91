"""Spread: how far a prediction may be off: a deviation of its logarithm for every set, and what it rests on.

A set whose kin are given takes the deviation of held-out rows; a set on a machine or a framework without rows of its
own takes a common bias as well (`transfer`).
"""

from typing import NamedTuple

from analysis.predictions.clusters.case import Case


class Spread(NamedTuple):
    """Deviations of a set: of held-out rows, and of what all its rows share."""

    own: float
    transfer: float
    why: str

    @property
    def log_sd(self) -> float:
        """Both together."""
        return (self.own**2 + self.transfer**2) ** 0.5


STEP: dict[str, Spread] = {
    "bloom_a100_topologies": Spread(0.065, 0.0, "held-out rows of the same search"),
    "vtrain_multi": Spread(0.09, 0.05, "held-out rows; other widths than the given one"),
    "megatron_scaling": Spread(0.05, 0.09, "no row given: constants of other Megatron runs"),
    "zero_bubble_table4": Spread(0.04, 0.08, "constants of the same group's later runs; attention kernels differ"),
    "vocab_stage_times": Spread(0.03, 0.0, "held-out rows of the same table"),
    "llm_foundry_fsdp": Spread(0.06, 0.05, "H100: four rows given"),
    "internevo": Spread(0.03, 0.05, "8 and 16 devices given, up to 1024 asked"),
    "torchtitan": Spread(0.12, 0.12, "four rows given; techniques differ"),
    "simumax_b200": Spread(0.06, 0.10, "five rows given, of one model"),
    "megatron_bridge": Spread(0.10, 0.07, "held-out rows of dense models; other releases and devices are asked"),
    "nemo_automodel": Spread(0.12, 0.15, "no row given"),
    "dgxc_benchmarking": Spread(0.04, 0.02, "other sizes and releases of given models"),
    "mlperf_training": Spread(0.06, 0.06, "later rounds and other devices than the given ones"),
    "lohan_rtx4090": Spread(0.06, 0.10, "one device and one size given"),
    "atorch_llama2": Spread(0.05, 0.12, "four rows given; FSDP alone"),
    "xtuner_h800": Spread(0.10, 0.07, "three configurations given"),
    "threads_and_readmes": Spread(0.15, 0.15, "no row given"),
    "primus_projection": Spread(0.15, 0.20, "no row given; another tool's projection"),
}
MEMORY: dict[str, Spread] = {
    "bloom_a100_topologies": Spread(0.08, 0.0, "given rows"),
    "zero_bubble_table4": Spread(0.05, 0.10, "no row given"),
    "internevo": Spread(0.15, 0.15, "rows of another model given"),
    "torchtitan": Spread(0.10, 0.10, "four rows given"),
    "megatron_ci_golden": Spread(0.06, 0.0, "given rows"),
    "simumax_b200": Spread(0.03, 0.03, "five rows given, of one model"),
    "peft_method_comparison": Spread(0.05, 0.0, "given rows; methods that keep something else"),
    "torchtune_memory": Spread(0.12, 0.10, "batch and length not printed"),
    "atorch_llama2": Spread(0.05, 0.15, "four rows given; FSDP alone"),
}
EXPERTS = 0.28  # dispatchers differ between releases by more than anything else does
NEW_DEVICE = {"b300": 0.12, "gb300": 0.12, "b200": 0.10}
NVFP4 = 0.20


def step_log_sd(case: Case) -> float:
    """Deviation of the logarithm of a predicted step."""
    found = STEP[case.set_name].log_sd ** 2
    if case.job is None:
        return float(found**0.5)
    if case.set_name in ("megatron_bridge", "nemo_automodel") and case.job.architecture.experts:
        found += EXPERTS**2
    if case.set_name == "megatron_bridge":
        found += NEW_DEVICE.get(case.job.machine.device.name, 0.0) ** 2
        found += NVFP4**2 * (case.job.precision == "nvfp4")
    return float(found**0.5)


def memory_log_sd(case: Case) -> float:
    """Deviation of the logarithm of predicted bytes."""
    return MEMORY[case.set_name].log_sd
