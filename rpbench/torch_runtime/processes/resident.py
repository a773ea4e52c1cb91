"""Resident: contenders that stay on the ranks side by side and run a step each when they are asked.

Their weights, receive buffers and torch's own schedule objects are made once, so that two orders of the same work can
alternate a step at a time, in processes that hold both.
"""

import gc
import json
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from rpbench.torch_runtime.processes.board import Place
from rpbench.torch_runtime.processes.member import Member
from rpbench.torch_runtime.recorded.gathering import Answer, gather
from rpbench.torch_runtime.request import TorchRequest

MARK = '{"resident"'  # how its line begins


@dataclass(frozen=True)
class StepRequest:
    """One step of a resident.

    Args:
        name: of the resident; it is made of its request when its name is first heard.
        request: what it is; one step runs on the first step's microbatches, and weights stay.
    """

    name: str
    request: TorchRequest

    @property
    def num_ranks(self) -> int:
        """Processes in all."""
        return self.request.num_ranks

    @property
    def device(self) -> str:
        return self.request.device

    def to_json(self) -> str:
        """One line."""
        return json.dumps({"resident": self.name, "request": asdict(self.request)})

    @classmethod
    def from_json(cls, text: str) -> "StepRequest":
        """The request `to_json` wrote."""
        found = json.loads(text)
        return cls(found["resident"], TorchRequest(**found["request"]))


class Residents:
    """What stays on this rank.

    Args:
        place: this rank's line on the board.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._members: dict[str, Member] = {}

    def step(self, asked: StepRequest) -> Answer | None:
        """One step; the answer on rank 0, with the processor seconds of every rank, and None on the others.

        Raises:
            ValueError: if the ranks were asked for different things.
        """
        torch.set_num_threads(1)
        member = self._members.get(asked.name) or self._made(asked)
        gc.collect()
        gc.disable()
        try:
            used = time.process_time()
            member.run_once()
            used = time.process_time() - used
        finally:
            gc.enable()
        return gather(member, {"cpu_s": used})

    def _made(self, asked: StepRequest) -> Member:
        member = self._members[asked.name] = Member(asked.request, self._place)
        member.run_once()  # torch looks at shapes in the first step
        gc.collect()
        gc.freeze()  # so that collecting before a step takes milliseconds
        return member


def cpu_s(answer: Any) -> float:
    """Processor seconds of all ranks in the step of an answer."""
    return float(sum(rank["cpu_s"] for rank in answer["ranks"]))
