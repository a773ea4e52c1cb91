"""The fits, in order: which rows give which constants of which framework."""

from analysis.predictions.clusters.case import Case, rows_of
from analysis.predictions.clusters.fit import Problem
from analysis.predictions.clusters.jobs import cases_of_row

SETS = (
    "bloom_a100_topologies",
    "vtrain_multi",
    "megatron_scaling",
    "zero_bubble_table4",
    "vocab_stage_times",
    "llm_foundry_fsdp",
    "internevo",
    "torchtitan",
    "simumax_b200",
    "megatron_bridge",
    "megatron_ci_golden",
    "nemo_automodel",
    "primus_projection",
    "dgxc_benchmarking",
    "mlperf_training",
    "atorch_llama2",
    "xtuner_h800",
    "threads_and_readmes",
    "peft_method_comparison",
    "torchtune_memory",
    "lohan_rtx4090",
)
BRIDGE_EXPERTS = tuple(
    f"megatron_bridge_{each}"
    for each in ("moe", "moe_grace", "moe_h100", "early", "early_grace", "early_h100", "graphs", "drops")
)
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
        shared=("matmul", "attention", "elementwise", "loss", "narrow", "tokens", "microbatch_s", "step_s"),
        sds={"tokens": 1.5},
    ),
    Problem(
        "zero_bubble",
        ("zero_bubble_table4",),
        ("zero_bubble",),
        shared=("matmul", "elementwise", "loss", "head_alignment", "microbatch_s", "step_s"),
        prior_from="vocab_parallel",
        shrink=1.0,
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
            "hop_s",
        ),
        heirs=("internevo_memory",),
    ),
    Problem(
        "torchtitan",
        ("torchtitan",),
        ("torchtitan", "torchtitan_eager"),
        shared=(
            "matmul",
            "matmul_low",
            "attention",
            "elementwise",
            "intra",
            "inter",
            "loss",
            "tokens",
            "beside",
            "step_s",
        ),
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
        ("megatron_bridge", "megatron_bridge_h100"),
        shared=("matmul", "attention", "elementwise", "loss", "tokens", "intra", "inter", "microbatch_s", "step_s"),
        own=("matmul_low",),
        sds={"step_s": 0.5, "attention": 0.15},
        heirs=("megatron_core",),
    ),
    Problem(
        "bridge_experts",
        ("megatron_bridge",),
        BRIDGE_EXPERTS,
        shared=("matmul", "attention", "grouped", "intra", "step_s"),
        parts=(
            *(("dispatch_s", (name,)) for name in BRIDGE_EXPERTS),
            *(("inter", tuple(each for each in BRIDGE_EXPERTS if ("h100" in each) is new)) for new in (False, True)),
            *(
                ("matmul_low", tuple(each for each in BRIDGE_EXPERTS if ("h100" in each) is new))
                for new in (False, True)
            ),
            *(("elementwise", (name,)) for name in BRIDGE_EXPERTS),
        ),
        sds={"step_s": 0.5},
    ),
    Problem(
        "nemo",
        ("dgxc_benchmarking",),
        ("nemo_2411", "nemo_2502", "nemo_2504"),
        shared=("attention", "elementwise", "loss", "tokens", "intra", "inter", "jitter", "microbatch_s", "step_s"),
        own=("matmul", "matmul_low"),
        sds={"step_s": 0.5},
    ),
    Problem(
        "nemo_tuned",
        ("dgxc_benchmarking",),
        ("nemo_tuned",),
        shared=("matmul", "matmul_low", "elementwise", "microbatch_s", "step_s"),
        prior_from="nemo_2502",
        shrink=1.0,
    ),
    Problem(
        "nemo_experts",
        ("dgxc_benchmarking",),
        ("nemo_moe", "nemo_moe_2505"),
        shared=("matmul", "attention", "grouped", "intra", "inter", "jitter", "dispatch_s", "step_s"),
        own=("matmul_low", "elementwise"),
    ),
    Problem(
        "xla",
        ("dgxc_benchmarking",),
        ("xla",),
        shared=(
            "matmul",
            "matmul_low",
            "attention",
            "elementwise",
            "loss",
            "again",
            "inter",
            "beside",
            "jitter",
            "step_s",
        ),
        sds={"again": 0.3, "beside": 1.0, "jitter": 1.2},
    ),
    Problem(
        "mlperf",
        ("mlperf_training",),
        ("mlperf", "mlperf_lora"),
        shared=("matmul_low", "attention", "intra", "inter", "jitter", "step_s"),
        own=("elementwise", "microbatch_s"),
        prior_from="nemo_2504",
        shrink=1.0,
    ),
    Problem(
        "atorch",
        ("atorch_llama2",),
        ("atorch",),
        shared=("matmul", "attention", "elementwise", "loss", "again", "inter", "step_s"),
    ),
    Problem(
        "xtuner",
        ("xtuner_h800",),
        ("xtuner",),
        shared=("matmul", "attention", "elementwise", "grouped", "again", "dispatch_s", "intra", "inter"),
        sds={"dispatch_s": 1.0},
    ),
    Problem(
        "automodel",
        ("nemo_automodel",),
        ("automodel",),
        shared=("matmul", "attention", "elementwise", "grouped", "dispatch_s", "loss", "intra", "step_s"),
    ),
)


def given(names: tuple[str, ...]) -> list[Case]:
    """All cases of these sets whose answers are given."""
    return [case for name in names for row in rows_of("measured", name) for case in cases_of_row(row)]


def asked(name: str) -> list[Case]:
    """The cases of a set whose answers are withheld."""
    return [case for row in rows_of("challenge", name) for case in cases_of_row(row)]


def cases_of(problem: Problem) -> list[Case]:
    """The given cases of a problem's frameworks."""
    return [case for case in given(problem.rows) if case.job and case.job.software.name in problem.softwares]
