"""Records of a torch duel that never ran: steps of known length, in turns like those of a real one."""

from random import Random

from rpbench.run.modes.duel.contenders import torch_contenders
from rpbench.run.modes.duel.findings import derived_fields
from rpbench.run.modes.duel.runs import MISSING

SCHEDULES = ("1f1b", "zb_v")
REPLAYED, PREDICTED = 0.92, 0.9  # of a step
SHARES = {"late": 0.03, "messages": 0.02, "after": 0.01, "between": 0.005, "outside": 0.015}  # sum to 1 - REPLAYED


def start_of(place, seconds, draw, *, num_turns=40, others=0.0):
    """The runs of an entrant that takes `seconds` on average and stands at a place of every turn."""
    took = [seconds * draw.uniform(0.995, 1.005) for _ in range(num_turns)]
    columns = {
        "at_s": [4.0 * turn + 0.5 * place for turn in range(num_turns)],
        "wall_s": took,
        "replay_s": [REPLAYED * each for each in took],
        "cpu_s": [1.8 * each for each in took],
        "elapsed_s": took,
        "others_s": [others * each for each in took],
        "predicted_s": [None, *(PREDICTED * each for each in took[1:])],
    }
    return columns | {f"missing_{part}_s": [2 * SHARES[part] * each for each in took] for part in MISSING}


def rows(seconds=None, *, others=0.0, num_cores=2, row=None, schedules=SCHEDULES):
    """contender -> record; references stand at places 0 and 4 of a turn of eight, each schedule's beside the other's.

    Args:
        seconds: contender -> what its step takes; 1.0 where it is left out.
        others: cores that other programs keep busy.
        row: fields that every record has besides.
    """
    found = {}
    places = {"own": 0, "own_twin": 4, "table": 2, "threads": 6}
    for number, each in enumerate(torch_contenders(schedules)):
        draws = [Random(100 * number + start) for start in range(2)]
        place = places[each.role] + schedules.index(each.schedule)
        runs = [start_of(place, (seconds or {}).get(each.name, 1.0), draw, others=others) for draw in draws]
        found[each.name] = (row or {}) | {
            "run_id": f"torch duel {each.name}", "schedule": each.schedule, "contender": each.name, "role": each.role,
            "engine": each.engine, "mode": "torch_duel", "backend": None, "model": "half_mid_gpt", "status": "ok",
            "reason": None, "evidence": "measured", "num_devices": 2, "num_actions": 32, "partition_layers": "5-3",
            "grad_max_abs_diff": 0.0, "weight_max_abs_diff": 0.0, "makespan_s": 1.0, "foreign_cpu_share": others,
            "starts": [{"num_cores": num_cores}] * 2, "runs": runs,
            "config": {**(row or {}).get("config", {}), "mode": {"half_width": 0.02, "num_starts": 2}},
        }  # fmt: skip
    for name, fields in derived_fields(found).items():
        found[name] |= fields
    return found
