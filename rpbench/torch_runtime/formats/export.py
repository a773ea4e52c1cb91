"""Export: a schedule in the form another program reads, by name, as `show ... format=` prints it.

torchtitan's options name a model: a module (`--module qwen3`) has the parts of a layer (Qwen3 has norms of queries and
keys, Llama 3 has none), a flavour has the sizes, and a function in `config_registry.py` (`--config qwen3_1_7b`) starts
a flavour; where there is none it must be written first.

Source: torchtitan 0.3.0, `models/llama3` and `models/qwen3` (`__init__.py`, `config_registry.py`), and
`models/common/decoder.py`, which refuses a tied head under a pipeline.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from rpbench.engine.state.updates.optimizer import OptimizerSettings
from rpbench.ir.partition import Partition
from rpbench.ir.schedule import Schedule, ScheduleError, to_text
from rpbench.ir.timeline import Timeline
from rpbench.torch_runtime.formats import frameworks
from rpbench.torch_runtime.formats.deepspeed import check_deepspeed, deepspeed_config, deepspeed_parts
from rpbench.torch_runtime.formats.megatron import megatron_text
from rpbench.torch_runtime.formats.tables import to_csv
from rpbench.workload.architecture import Architecture
from rpbench.workload.elsewhere import torchtitan_refuses
from rpbench.yaml_file import read_keys

Times = Callable[[], Timeline]  # simulated when asked for: only one form needs it


class Given(NamedTuple):
    """Inputs of a form beside the schedule: timeline, name of its table, model, host, numbers, optimizer."""

    times: Times
    csv_path: str = "schedule.csv"
    model: Architecture | None = None
    host_memory_bytes: int | None = None
    plan: frameworks.PlanNumbers | None = None
    optimizer: OptimizerSettings = OptimizerSettings()


def export(schedule: Schedule, form: str, given: Given) -> str:
    """A schedule in one of `FORMS`; ValueError for an unknown form, or one that cannot hold the schedule."""
    if form not in FORMS:
        raise ValueError(f"format={form}: one of {', '.join(FORMS)}")
    return FORMS[form](schedule, given)


def _cut(schedule: Schedule, form: str) -> Partition:
    """The schedule's partition; raises ValueError if it has none."""
    if schedule.partition is None:
        raise ValueError(f"format={form} writes a partition, and this schedule has none: name a model")
    return schedule.partition


def _framework_lines(schedule: Schedule, given: Given) -> str:
    """Options of torchtitan and, as comments, of AutoModel for a pipeline."""
    plan = given.plan or frameworks.numbers_of(schedule)
    frameworks.check_replicas(schedule, plan, "torchtitan")
    if given.model is not None:
        sharing = plan.shards * plan.context * plan.tensor
        refusal = torchtitan_refuses(given.model, plan.tensor, plan.expert, plan.expert_tensor or plan.tensor, sharing)
        if refusal:
            raise ValueError(refusal)
    first, *others = frameworks.FRAMEWORKS
    told = () if given.model is None else model_notes(given.model, pipeline=plan.pipeline > 1)
    text = "".join(f"# {note}\n" for note in told)
    text += frameworks.table_lines(schedule, given.csv_path, first, plan=plan).to_toml() + "\n"
    for other in others if plan.pipeline > 1 else ():
        lines = frameworks.table_lines(schedule, given.csv_path, other, plan=plan).to_toml().splitlines()
        text += "\n".join([f"# --- {other}", *(f"# {line}" for line in lines)]) + "\n"
    return text


def _megatron(schedule: Schedule, given: Given) -> str:
    partition, plan = _cut(schedule, "megatron_layout"), given.plan or frameworks.numbers_of(schedule)
    frameworks.check_replicas(schedule, plan, "megatron_layout")
    return megatron_text(schedule, partition, plan)


def _accelerate(schedule: Schedule, given: Given) -> str:
    plan = given.plan or frameworks.numbers_of(schedule)
    frameworks.check_replicas(schedule, plan, "fsdp2")
    return frameworks.accelerate_yaml(plan)


def _deepspeed_config(schedule: Schedule, given: Given) -> str:
    """The whole config as one JSON object; the boundaries of a pipeline in it."""
    plan = given.plan or frameworks.numbers_of(schedule)
    check_deepspeed(schedule, plan)
    parts = deepspeed_parts(schedule.partition) if plan.pipeline > 1 and schedule.partition is not None else ()
    return json.dumps(deepspeed_config(plan, parts), indent=2) + "\n"


def _deepspeed_parts(schedule: Schedule, given: Given) -> str:
    partition = _cut(schedule, "deepspeed_parts")
    check_deepspeed(schedule, given.plan or frameworks.numbers_of(schedule), "deepspeed_parts")
    return json.dumps(deepspeed_parts(partition)) + "\n"


def _roundpipe(schedule: Schedule, given: Given) -> str:
    """The released library's plan as one JSON object, with the host's memory where the model has a shape."""
    partition = _cut(schedule, "roundpipe")
    if schedule.name != "roundpipe":
        raise ScheduleError(
            f"schedule={schedule.name}: RoundPipe's library runs RoundPipe alone; take schedule=roundpipe with "
            "format=roundpipe, or write this order by format=text"
        )
    plan = frameworks.roundpipe_plan(partition)
    if given.model is not None:
        needed = frameworks.roundpipe_host_bytes(given.model, given.optimizer)
        plan["host_bytes"] = needed
        if given.host_memory_bytes is not None:
            plan["fits_host"] = {pin: num_bytes <= given.host_memory_bytes for pin, num_bytes in needed.items()}
    return json.dumps(plan) + "\n"


# --- torchtitan's models ---------------------------------------------------------------------------------------------


class Flavor(NamedTuple):
    """Sizes that torchtitan has; `config` is the function that starts them, empty where there is none."""

    name: str
    num_layers: int
    hidden: int
    heads: int
    key_value_heads: int
    vocab: int
    config: str = ""


FLAVORS = {
    module: [Flavor(*row) for row in rows]
    for module, rows in read_keys(Path(__file__).with_name("torchtitan.yaml")).items()
}


def module_of(model: Architecture) -> str | None:
    """torchtitan's module with a model's parts; None if neither of the two has them."""
    others = (model.latent, model.windows, model.learned_positions, model.biases, model.attention_sinks)
    if not model.gated or model.attention_gate or any(others):
        return None
    if model.qk_norm:
        return "qwen3"
    return None if model.experts else "llama3"


def model_notes(model: Architecture, *, pipeline: bool) -> Iterator[str]:
    """Notes on torchtitan's options for a model, and on what it refuses."""
    module = module_of(model)
    if module is None:
        yield f"model: llama3 and qwen3 of torchtitan 0.3 lack parts of {model.name}: take a module that has them"
    else:
        norms = "with norms of queries and keys (qk_norm)" if model.qk_norm else "without norms of queries and keys"
        sizes = (model.num_layers, model.hidden, model.heads, model.key_value_heads, model.vocab)
        found = next((each for each in FLAVORS[module] if each[1:6] == sizes), None)
        yield f"model: --module {module}{f' --config {found.config}' if found and found.config else ''}, {norms}"
        if found is None or not found.config:
            has = f"the flavour {found.name}" if found else f"{model.num_layers} layers of {model.hidden}"
            yield f"torchtitan 0.3 starts no such {module}: add a function for {has} to its config_registry.py"
    if model.tied and pipeline:
        yield "torchtitan refuses a head tied to the embedding under a pipeline: set enable_weight_tying=False"


FORMS: Mapping[str, Callable[[Schedule, Given], str]] = {
    "text": lambda schedule, given: to_text(schedule),
    "torch_csv": lambda schedule, given: to_csv(schedule),
    "chrome_trace": lambda schedule, given: json.dumps(given.times().to_chrome_trace()) + "\n",
    "megatron_layout": _megatron,
    "torchtitan": _framework_lines,
    "deepspeed": _deepspeed_config,
    "deepspeed_parts": _deepspeed_parts,
    "fsdp2": _accelerate,
    "roundpipe": _roundpipe,
}
