"""The fits, in order: which rows give which constants of which framework."""

from analysis.predictions.clusters import bridge_rows, ci_rows, framework_rows, megatron_rows
from analysis.predictions.clusters.case import Case, Source, rows_of
from analysis.predictions.clusters.fit import Problem

SOURCES = {
    source.name: source
    for source in (
        Source("bloom_a100_topologies", megatron_rows.bloom),
        Source("vtrain_multi", megatron_rows.vtrain),
        Source("megatron_scaling", megatron_rows.scaling),
        Source("zero_bubble_table4", megatron_rows.zero_bubble),
        Source("vocab_stage_times", megatron_rows.vocab_parallel),
        Source("llm_foundry_fsdp", framework_rows.llm_foundry),
        Source("internevo", framework_rows.internevo),
        Source("torchtitan", framework_rows.torchtitan),
        Source("simumax_b200", framework_rows.simumax),
        Source("megatron_bridge", bridge_rows.bridge),
        Source("megatron_ci_golden", ci_rows.ci),
        Source("nemo_automodel", framework_rows.automodel),
        Source("primus_projection", framework_rows.primus),
    )
}

PROBLEMS = (
    Problem(
        "deepspeed_2022",
        ("bloom_a100_topologies", "vtrain_multi"),
        ("megatron_deepspeed", "megatron_2022"),
        shared=("matmul", "elementwise", "narrow", "tokens", "head_alignment", "intra", "loss"),
        own=("inter", "layer_s", "microbatch_s", "jitter", "session"),
        sds={"layer_s": 2.0},
        heirs=("megatron_2021",),
    ),
    Problem(
        "vocab_parallel",
        ("vocab_stage_times",),
        ("vocab_parallel",),
        shared=("matmul", "attention", "elementwise", "loss", "narrow", "microbatch_s", "step_s"),
        heirs=("zero_bubble",),
    ),
    Problem(
        "foundry_a100",
        ("llm_foundry_fsdp",),
        ("llm_foundry", "llm_foundry_bf16"),
        shared=(
            "matmul",
            "attention",
            "elementwise",
            "loss",
            "narrow",
            "tokens",
            "intra",
            "inter",
            "launch_s",
            "microbatch_s",
            "step_s",
            "jitter",
            "beside",
        ),
        own=("again",),
        sds={"again": 0.3},
    ),
    Problem(
        "foundry_h100",
        ("llm_foundry_fsdp",),
        ("llm_foundry_h100",),
        shared=("matmul", "attention", "elementwise", "inter", "microbatch_s", "step_s", "jitter"),
        prior_from="llm_foundry",
        shrink=0.7,
    ),
    Problem(
        "internevo",
        ("internevo",),
        ("internevo",),
        shared=(
            "matmul",
            "attention",
            "elementwise",
            "loss",
            "intra",
            "inter",
            "step_s",
            "microbatch_s",
            "broadcast_s",
        ),
        heirs=("internevo_memory",),
    ),
    Problem(
        "torchtitan",
        ("torchtitan",),
        ("torchtitan", "torchtitan_eager"),
        shared=("matmul", "matmul_low", "attention", "elementwise", "intra", "loss", "tokens", "beside", "step_s"),
    ),
    Problem(
        "torchtitan_tensor",
        ("torchtitan",),
        ("torchtitan_tp",),
        shared=("matmul", "matmul_low", "attention", "elementwise", "intra"),
        prior_from="torchtitan",
        shrink=1.0,
        sds={"matmul": 0.15, "matmul_low": 0.15, "intra": 0.2},
    ),
    Problem(
        "simumax",
        ("simumax_b200",),
        ("simumax",),
        shared=("matmul", "attention", "elementwise", "loss", "intra", "microbatch_s", "step_s"),
        sds={"matmul": 0.2},
    ),
    Problem(
        "bridge_dense",
        ("megatron_bridge",),
        ("megatron_bridge",),
        shared=("matmul_low", "attention", "elementwise", "loss", "tokens", "intra", "inter", "microbatch_s", "step_s"),
        sds={"step_s": 0.5, "attention": 0.15},
        heirs=("megatron_core", "automodel"),
    ),
    Problem(
        "bridge_experts",
        ("megatron_bridge",),
        ("megatron_bridge_moe",),
        shared=(
            "matmul",
            "matmul_low",
            "attention",
            "elementwise",
            "dispatch_s",
            "grouped",
            "imbalance",
            "intra",
            "inter",
        ),
    ),
)


def given(names: tuple[str, ...]) -> list[Case]:
    """All cases of these sets whose answers are given."""
    return [case for name in names for row in rows_of("measured", name) for case in SOURCES[name].read(row)]


def asked(name: str) -> list[Case]:
    """The cases of a set whose answers are withheld."""
    return [case for row in rows_of("challenge", name) for case in SOURCES[name].read(row)]


def cases_of(problem: Problem) -> list[Case]:
    """The given cases of a problem's frameworks."""
    return [case for case in given(problem.rows) if case.job and case.job.software.name in problem.softwares]
