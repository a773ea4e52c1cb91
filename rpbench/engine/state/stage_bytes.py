"""Bytes of stages: the weights and gradients that stay on devices, and those that come with what a device runs."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from rpbench.engine.executor import Gate, Handler
from rpbench.engine.layout import Layout
from rpbench.engine.state.device_memory import DeviceMemory
from rpbench.engine.state.ownership import Sharing
from rpbench.engine.workload import Workload
from rpbench.ir.action import COMPUTE, Action, Kind, parts_of
from rpbench.ir.schedule import Schedule, Weights
from rpbench.models.sharded.shards import held_parameters


@dataclass(frozen=True)
class StageBytes:
    """What the devices of a schedule hold of a workload's weights and gradients.

    Args:
        sharing: stage -> how its replicas share it.
        homes: stage -> device that keeps it, where it goes from device to device.
    """

    schedule: Schedule
    workload: Workload
    layout: Layout
    sharing: Mapping[int, Sharing]
    homes: Mapping[int, int]

    def staying(self) -> list[Counter[str]]:
        """Device -> bytes of the weights and gradients that stay there."""
        found: list[Counter[str]] = [Counter() for _ in range(self.schedule.shape.num_ranks)]
        if self._is_streamed:
            return found
        visits = (
            (device, part)
            for device, _, row in self.schedule.items()
            for action in row
            for part in parts_of(action)
            if part.kind in COMPUTE
        )
        for device, what, module in {
            (device, what, module)
            for device, part in visits
            for what in (("weights",) if part.kind is Kind.F else ("weights", "gradients"))
            for module in self.layout.modules_of(part)
        }:
            found[device][what] += self._staying(device, module)[what]
        return found

    def counted(self, handler: Handler, memory: DeviceMemory) -> Handler:
        """A handler whose device's memory is counted."""
        devices = [device for device, _, row in self.schedule.items() for _ in row]
        streamed = self._is_streamed

        def run(action: Action, number: int, gate: Gate) -> None:
            comes: Counter[str] = Counter()
            if streamed:
                modules = self.layout.modules_of(action)
                comes = sum((self._of(module, devices[number]) for module in modules), comes)
                if action.kind in (Kind.F, Kind.R):
                    del comes["gradients"]
            with memory.visit(devices[number], comes):
                handler(action, number, gate)

        return run

    @property
    def _is_streamed(self) -> bool:
        return self.schedule.weights is Weights.STREAMED

    def _staying(self, device: int, module: int) -> Counter[str]:
        """The bytes of a module's weights and gradients that stay on a device that runs it."""
        stage = self.layout.stage_of(module)
        sharing = self.sharing.get(stage)
        if self.homes.get(stage, device) != device:
            return Counter()
        if sharing is None:
            return self._of(module, device)
        size = next((parameter.itemsize for parameter in self.workload.modules[module].parameters()), 0)
        weights, gradients = sharing.kept_elements(module, device)
        return Counter(weights=weights * size, gradients=gradients * size)

    def _of(self, module: int, device: int) -> Counter[str]:
        parameters = held_parameters(self.workload.modules[module], device)
        trained = sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
        return Counter(weights=sum(parameter.nbytes for parameter in parameters), gradients=trained)
