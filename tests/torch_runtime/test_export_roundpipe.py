"""The export for the released RoundPipe: its plan and its host memory by hand, and its own class where installed."""

from types import SimpleNamespace

import pytest

from rpbench.advice.rows import _unwritten
from rpbench.engine.state.updates.optimizer import OptimizerSettings
from rpbench.ir.partition import Partition, parse, symmetric
from rpbench.ir.schedule import ScheduleError, Shape
from rpbench.registry import entries
from rpbench.torch_runtime.formats.export import Given, export
from rpbench.torch_runtime.formats.frameworks import roundpipe_host_bytes, roundpipe_plan
from rpbench.workload.architecture import Architecture

FUSED = Partition((2, 3), (1, 2, 2, 2), fused=True)


def test_a_fused_plan_by_hand():
    """Seven layers: module 0 is the embedding, 8 the head; the last two layers run forward where backward begins."""
    assert roundpipe_plan(FUSED) == {
        "run_type": "fused",
        "num_layers": 9,
        "fwd_plan": [[0, 3], [3, 6]],
        "bwd_plan": [[6, 9], [4, 6], [2, 4], [0, 2]],
    }
    plain = roundpipe_plan(symmetric((2, 3)))
    assert (plain["run_type"], plain["fwd_plan"], plain["bwd_plan"]) == ("train", [[0, 3], [3, 7]], [[3, 7], [0, 3]])
    with pytest.raises(ValueError, match="forward range 1 of the plan has no layer"):
        roundpipe_plan(symmetric((2, 0, 3)))


@pytest.mark.parametrize(
    "cut", ["1-2|2-1-2*", "0-3|3-2*", "3-0|1-2-2*", "4|0-3-1", "0-3-1|1-2-1", "2-0-2|2-2-0", "1-3|2-0-2", "0-4-0|1-3"]
)
def test_advice_knows_which_plans_are_refused(cut):
    partition, model = parse(cut), Architecture("small", num_layers=5, hidden=24, heads=2, vocab=40, seq_len=8)
    why = _unwritten(SimpleNamespace(partition=partition), SimpleNamespace(model=model))
    try:
        roundpipe_plan(partition)
    except ValueError:
        assert "no range without layers" in why
    else:
        assert why == ""


def test_no_plan_for_an_order_that_the_library_does_not_run():
    for name in ("gpipe", "mobius"):
        order = entries()[name].build(Shape(2, 4 if name == "mobius" else 2, 4))
        order = order.with_partition(symmetric((1,) * order.shape.num_stages))
        with pytest.raises(ScheduleError, match=f"schedule={name}: RoundPipe's library runs RoundPipe alone"):
            export(order, "roundpipe", Given(lambda: None))


def test_its_host_memory_by_hand():
    """16-bit weights and gradients in blocks of powers of two, 16 bytes a parameter in 32 bits; two layers alike."""
    model = Architecture("small", num_layers=2, hidden=24, heads=2, vocab=40, seq_len=8, inner=32)
    layer = 4 * [24 * 24] + 3 * [24 * 32] + 2 * [24]
    shapes = [40 * 24, *layer, *layer, 24, 40 * 24]
    blocks = sum(next(2**n for n in range(40) if 2**n >= 2 * size) for size in shapes)
    total = sum(shapes)
    matrices = (24, 40), *[(24, 24)] * 8, *[(24, 32)] * 6, (24, 40)
    state = {
        "adamw": 12 * total,
        "sgd": 4 * total,
        "rmsprop": 8 * total,
        "adafactor": 4 * total + 4 * (sum(map(sum, matrices)) + 5 * 24),  # norms keep a moment of every element
    }
    for name, num_bytes in state.items():
        assert roundpipe_host_bytes(model, OptimizerSettings(name=name)) == {
            "alloc": 2 * blocks + 4 * total + num_bytes,
            "register": 2 * total + blocks + 4 * total + num_bytes,
            "off": 2 * total + blocks + 4 * total + num_bytes,
        }
    assert OptimizerSettings(name="sgd", momentum=0.9).state_bytes((3, 5)) == 8 * 15


def test_the_librarys_own_class_takes_the_plan():
    try:
        from roundpipe import ModelExecutePlan
    except Exception as error:  # it asks the GPUs for their memory when it is imported
        pytest.skip(f"roundpipe cannot be imported: {error}")
    for partition in (FUSED, symmetric((2, 3))):
        found, plan = roundpipe_plan(partition), ModelExecutePlan()
        plan.fwd_plan, plan.bwd_plan = ([range(*each) for each in found[name]] for name in ("fwd_plan", "bwd_plan"))
        plan.check_valid(found["num_layers"], found["run_type"])
