"""Passes: forward, recomputation and backward of stages, and the tensors that lie between them.

Between actions, tensors are at home on the host: inputs kept for recomputation, outputs on their way to the next
stage, slopes (gradients of the loss by a stage's input) on their way to the one below. Each is taken by its one
reader, so nothing is left when a schedule is done.
"""

import math
from collections.abc import Callable

import torch

from rpbench.engine.executor import Gate
from rpbench.engine.gradients import Gradients, Tensors
from rpbench.engine.layout import Layout
from rpbench.engine.reads import Reads
from rpbench.engine.stage import Grain, Graph, Rest, Stages, backward, input_gradient, pieces, weight_gradients
from rpbench.ir.action import Action

Differentiate = Callable[[Graph, torch.Tensor | None], tuple[torch.Tensor | None, Tensors]]


class NonFiniteLoss(ArithmeticError):
    """A microbatch's loss is infinite or not a number."""


class Passes:
    """The handlers of everything that computes.

    Attributes:
        losses: microbatch -> its share of its step's mean loss.
        read: number of an action -> the version its weights had.
    """

    def __init__(self, stages: Stages, layout: Layout, reads: Reads, gradients: Gradients, grain: Grain) -> None:
        self.losses: dict[int, float] = {}
        self.read: dict[int, int] = {}
        self._stages, self._layout, self._reads, self._gradients, self._grain = stages, layout, reads, gradients, grain
        self._workload = stages.workload
        self._kept: dict[tuple[int, int], torch.Tensor] = {}  # (module, microbatch) -> its input
        self._outputs: dict[tuple[int, int], torch.Tensor] = {}  # (forward stage, microbatch) -> its output
        self._heads: dict[int, Graph] = {}  # microbatch -> the head's graph
        self._recomputed: dict[tuple[int, int], Graph] = {}  # (backward stage, microbatch) -> its topmost piece
        self._slopes: dict[tuple[int, int], torch.Tensor | None] = {}  # (backward stage, microbatch) -> its input's
        self._halves: dict[tuple[int, int], list[Rest]] = {}  # after I, before W

    @property
    def num_left(self) -> int:
        """Tensors and graphs that still wait for their reader."""
        waiting = self._kept, self._outputs, self._heads, self._recomputed, self._slopes, self._halves
        return sum(len(tensors) for tensors in waiting)

    # --- handlers ---

    def forward(self, action: Action, number: int, gate: Gate) -> None:
        modules, (microbatch, version) = self._layout.forward[action.stage], self._at(action, number)

        def note(module: int, value: torch.Tensor) -> None:
            if module and (self._grain == "layer" or module in self._layout.starts):
                self._kept[module, microbatch] = value

        x = self._stages.keep(
            self._below_head(modules), self._input(action.stage, microbatch), microbatch, version, note
        )
        if self._layout.head in modules:
            graph = self._heads[microbatch] = self._stages.graph(modules[-1:], x, microbatch, version)
            self._note_loss(microbatch, graph.end)
        else:
            self._outputs[action.stage, microbatch] = x
        self._release(modules, version)

    def fused(self, action: Action, number: int, gate: Gate) -> None:
        modules, (microbatch, version) = self._layout.backward[action.stage], self._at(action, number)
        graph = self._stages.graph(modules, self._input(len(self._layout.forward), microbatch), microbatch, version)
        self._note_loss(microbatch, graph.end)
        gate()
        slope, gradients = backward(graph, None)
        self._hand_down(action.stage, microbatch, slope)
        self._hand_over(action.stage, microbatch, gradients)
        self._release(modules, version)

    def recompute(self, action: Action, number: int, gate: Gate) -> None:
        modules, (microbatch, version) = self._layout.backward[action.stage], self._at(action, number)
        again = self.recomputed(action.stage)
        if again:
            self._recomputed[action.stage, microbatch] = self._again(again[-1], microbatch, version)
        self._release(modules, version)

    def backward(self, action: Action, number: int, gate: Gate) -> None:
        gradients = self._go_back(action, number, gate, backward)
        self._hand_over(action.stage, action.microbatch or 0, gradients)

    def backward_for_input(self, action: Action, number: int, gate: Gate) -> None:
        """The first half: what is handed down at once; the second half finds what is left to do."""
        halves = self._halves[action.stage, action.microbatch or 0] = []

        def differentiate(graph: Graph, slope: torch.Tensor | None) -> tuple[torch.Tensor | None, Tensors]:
            below, rest = input_gradient(graph, slope)
            halves.append(rest)
            return below, {}

        self._go_back(action, number, gate, differentiate)

    def backward_for_weights(self, action: Action, number: int, gate: Gate) -> None:
        modules, (microbatch, version) = self._layout.backward[action.stage], self._at(action, number)
        gradients: Tensors = {}
        for rest in self._halves.pop((action.stage, microbatch)):
            gradients |= weight_gradients(rest)
        self._hand_over(action.stage, microbatch, gradients)
        self._release(modules, version)

    # --- what they share ---

    def recomputed(self, stage: int) -> list[range]:
        """The modules a backward stage runs again, piece by piece; its last piece is run first."""
        return pieces(self._below_head(self._layout.backward[stage]), self._grain)

    def _go_back(self, action: Action, number: int, gate: Gate, differentiate: Differentiate) -> Tensors:
        """Backward through a stage, recomputing what is not there; its weights' gradients."""
        stage, modules = action.stage, self._layout.backward[action.stage]
        microbatch, version = self._at(action, number)
        again = self.recomputed(stage)
        graph = self._recomputed.pop((stage, microbatch), None)
        if again and graph is None:
            graph = self._again(again[-1], microbatch, version)
        gate()
        gradients: Tensors = {}
        if self._layout.head in modules:
            slope, gradients = differentiate(self._heads.pop(microbatch), None)
        else:
            slope = self._slopes.pop((stage + 1, microbatch))
        for piece in reversed(again):
            slope, found = differentiate(graph or self._again(piece, microbatch, version), slope)
            gradients |= found
            graph = None
        self._hand_down(stage, microbatch, slope)
        self._release(modules, version)
        return gradients

    def _at(self, action: Action, number: int) -> tuple[int, int]:
        """Microbatch and version of an action, the latter noted."""
        assert action.microbatch is not None
        version = self.read[number] = self._reads.version(action, number)
        return action.microbatch, version

    def _input(self, stage: int, microbatch: int) -> torch.Tensor:
        """What a forward stage, or the fused stage behind the last, begins with."""
        if stage == 0:
            return self._workload.batch(microbatch).tokens
        return self._outputs.pop((stage - 1, microbatch))

    def _again(self, modules: range, microbatch: int, version: int) -> Graph:
        """Run modules once more, with graph, from the input kept for them."""
        first = modules.start
        x = self._kept.pop((first, microbatch)) if first else self._workload.batch(microbatch).tokens
        return self._stages.graph(modules, x, microbatch, version)

    def _below_head(self, modules: range) -> range:
        return modules[:-1] if self._layout.head in modules else modules

    def _hand_down(self, stage: int, microbatch: int, slope: torch.Tensor | None) -> None:
        if stage:
            self._slopes[stage, microbatch] = slope

    def _hand_over(self, stage: int, microbatch: int, gradients: Tensors) -> None:
        self._gradients.add(stage, microbatch // self._workload.num_microbatches + 1, microbatch, gradients)

    def _note_loss(self, microbatch: int, loss: torch.Tensor) -> None:
        value = self.losses[microbatch] = float(loss.detach())
        if not math.isfinite(value):
            raise NonFiniteLoss(
                f"the loss of microbatch {microbatch} is {value}; lower learning_rate, or set clip_norm"
            )

    def _release(self, modules: range, version: int) -> None:
        for module in modules:
            self._stages.weights.release(module, version)
