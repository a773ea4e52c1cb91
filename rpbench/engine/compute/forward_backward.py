"""Passes: forward, recomputation and backward of stages, and the tensors that pass between them.

Between actions the host keeps the inputs for recomputation, the outputs for the next stage, and the gradients of a
stage's input for the stage below. Each tensor has one reader, which removes it, so nothing is left when a schedule is
done.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from rpbench.engine.compute.head_shards import HeadShards
from rpbench.engine.compute.segments import Exchange, Segment, Segments, segment_of
from rpbench.engine.compute.stage import (
    Grain,
    Graph,
    Rest,
    Stages,
    backward,
    input_gradient,
    pieces,
    present,
    weight_gradients,
)
from rpbench.engine.executor import Gate
from rpbench.engine.layout import Layout
from rpbench.engine.peers import here
from rpbench.engine.state.device_memory import DeviceMemory
from rpbench.engine.state.gradients import Gradients, Move, Tensors
from rpbench.engine.state.loss_scale import LossScaler
from rpbench.engine.state.saved_activations import SavedActivations
from rpbench.engine.state.weights_read import Adjustments, Reads
from rpbench.ir.action import Action, Kind
from rpbench.passes.recomputation import Recompute

# Stand-ins replace the input and output of a graph whose activations leave the device.
#
# A graph holds its input and output. Their values are needed only where an operation has saved them, and saved tensors
# move. A stand-in has the shape and type of a tensor and one element of memory; gradients go through it unchanged:
#
#     leaf (no values)  ->  x  ->  stage  ->  y  ->  end (no values)


class _StandIn(torch.autograd.Function):
    """Replaces one tensor in a graph by another of the same shape."""

    @staticmethod
    def forward(ctx: Any, place: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


def enter(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A leaf without values, whose gradient is that of x, and the x that a graph begins with."""
    leaf = _hollow(x).requires_grad_()
    with torch.enable_grad():
        return leaf, _StandIn.apply(leaf, x)


def leave(end: torch.Tensor) -> torch.Tensor:
    """The end of a graph without its values."""
    with torch.enable_grad():
        return _StandIn.apply(end, _hollow(end))


def _hollow(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().new_zeros(()).expand(tensor.shape)


# Backward of a segment: as of a whole sequence, with gradients of keys and values going in and coming out.


def segment_backward(
    segments: Segments, graph: Graph, gradient: torch.Tensor | None
) -> tuple[torch.Tensor | None, Tensors]:
    """As `stage.backward`; the gradients of the keys and values that the graph has read go to `segments`."""
    exchange = graph.exchange or Exchange(segments, (0, 0), with_graph=True)  # the head alone has none
    places = [(module, part) for module, found in exchange.earlier.items() for part in range(len(found))]
    before = [tensor for module, part in places for tensor in exchange.earlier[module][part]]
    inputs = [*graph.leaves.values(), *before, *(() if graph.start is None else (graph.start,))]
    found: tuple[torch.Tensor | None, ...] = (None,) * len(inputs)
    outputs = [(end, grad) for end, grad in ((graph.end, gradient), *segments.take(exchange)) if end.requires_grad]
    if inputs and outputs:
        ends, grads = zip(*outputs, strict=True)
        found = torch.autograd.grad(ends, inputs, grads, allow_unused=True)
    num_leaves = len(graph.leaves)
    for number, (module, part) in enumerate(places):
        pair = found[num_leaves + 2 * number : num_leaves + 2 * number + 2]
        segments.add(module, (exchange.segment[0], part), pair)
    return (None if graph.start is None else found[-1]), present(graph.leaves, found)


Differentiate = Callable[[Graph, torch.Tensor | None], tuple[torch.Tensor | None, Tensors]]


class NonFiniteLoss(ArithmeticError):
    """A microbatch's loss is infinite or not a number."""


class Passes:
    """The handlers of all compute actions."""

    def __init__(
        self,
        stages: Stages,
        layout: Layout,
        reads: Reads,
        gradients: Gradients,
        grain: Grain,
        adjustments: Adjustments | None = None,
        scaler: LossScaler | None = None,
        memory: DeviceMemory | None = None,  # that counts the kept inputs; None where they are at home
        recompute: Recompute = "all",
        saved: SavedActivations | None = None,  # what kept graphs have saved, where that moves
    ) -> None:
        self.losses: dict[int, float] = {}  # microbatch -> its share of its step's mean loss
        # (number, plain action) -> the weight version it read; an OVERLAP's number has several
        self.read: dict[tuple[int, Action], int] = {}
        self.recompute_head = False  # recompute the head in backward, because its weights leave the device in between
        self._stages, self._layout, self._reads, self._gradients, self._grain = stages, layout, reads, gradients, grain
        self._adjustments, self._scaler, self._memory = adjustments, scaler, memory
        self._recompute, self._saved = recompute, saved
        self._workload, self._segments = stages.workload, Segments(stages.num_parts)
        self._kept: dict[tuple[int, Segment], torch.Tensor] = {}  # (module, segment) -> its input
        self._stored: dict[tuple[int, Segment], torch.Tensor] = {}  # the same, moved off its device
        self._outputs: dict[tuple[int, Segment], torch.Tensor] = {}  # (forward stage, segment) -> its output
        self._graphs: dict[tuple[int, Segment], Graph] = {}  # (stage, segment) -> what lives from forward to backward
        self._held: dict[tuple[int, Segment], tuple[range, int]] = {}  # the same -> its modules, and their version
        self._recomputed: dict[tuple[int, Segment], Graph] = {}  # (backward stage, segment) -> its topmost modules
        self._grads: dict[tuple[int, Segment], torch.Tensor | None] = {}  # (backward stage, segment) -> its input's
        self._halves: dict[tuple[int, Segment], list[Rest]] = {}  # after I, before W
        self._shares = HeadShards(stages.workload, stages.weights)

    @property
    def num_left(self) -> int:
        """Tensors and graphs that no action has read yet."""
        waiting = (self._kept, self._stored, self._outputs, self._graphs, self._recomputed, self._grads, self._halves)
        saved = 0 if self._saved is None else len(self._saved)
        return sum(len(tensors) for tensors in waiting) + len(self._segments) + len(self._shares) + saved

    # --- handlers ---

    def forward(self, action: Action, number: int, gate: Gate) -> None:
        modules, (segment, version) = self._layout.forward[action.stage], self._at(action, number)

        def note(module: int, value: torch.Tensor) -> None:
            if module and (self._keeps_all or module in self._layout.starts):
                self._keep(module, segment, value)

        exchange = self._segments.exchange(segment, with_graph=False)
        x, weights = self._input(action.stage, segment), version
        if self._adjustments is not None:
            weights = self._adjustments.before_forward(action.stage, segment[0], version)
        again = self._run_again(modules)
        x = self._stages.keep(again, x, segment, weights, note, exchange)
        if len(again) < len(modules) or self._saved is not None:  # which knows a stage without layers as well
            graph, end = self._kept_graph(action.stage, modules[len(again) :], x, segment, weights)
            if not self.recompute_head:
                self._graphs[action.stage, segment] = graph
            elif not again:  # else the layers below it make its input again
                self._kept[modules[-1], segment] = x
            x = end
        if self._layout.head in modules:
            self._note_loss(segment, x)
        elif action.stage == len(self._layout.forward) - 1 and self._layout.num_head_shards:
            self._shares.enter(segment, x)
        else:
            self._outputs[action.stage, segment] = x
        if self._adjustments is not None:
            self._adjustments.after_forward(action.stage, weights)
        if (action.stage, segment) in self._graphs:  # whose backward goes through the very weights
            self._held[action.stage, segment] = modules[len(again) :], version
            modules = again
        self._release(modules, version)

    def fused(self, action: Action, number: int, gate: Gate) -> None:
        modules, (segment, version) = self._layout.backward[action.stage], self._at(action, number)
        graph = self._stages.graph(modules, self._input(len(self._layout.forward), segment), segment, version)
        self._note_loss(segment, graph.end)
        gate()
        grad, gradients = backward(graph, self._loss_scale(graph.end, version))
        self._hand_down(action.stage, segment, grad)
        self._hand_over(action.stage, segment, gradients)
        self._release(modules, version)

    def recompute(self, action: Action, number: int, gate: Gate) -> None:
        modules, (segment, version) = self._layout.backward[action.stage], self._at(action, number)
        again = self._run_again(modules)
        if again and self._layout.keeps_every > 1:  # keep the inputs that this backward and the next stage's need
            x = self._run_from_kept(again, segment, version, keeps_inner=self._grain == "layer")
            above = [each for each in self._layout.backward if again.stop in self._run_again(each)]
            if above and again.stop not in self._layout.starts:
                self._keep(again.stop, segment, x)
        elif again:
            self._recomputed[action.stage, segment] = self._again(self.recomputed(action.stage)[-1], segment, version)
        self._release(modules, version)

    def backward(self, action: Action, number: int, gate: Gate) -> None:
        whole = self._segments.num_parts == 1
        differentiate = backward if whole else partial(segment_backward, self._segments)
        gradients = self._go_back(action, number, gate, differentiate)
        self._hand_over(action.stage, segment_of(action), gradients)

    def backward_for_input(self, action: Action, number: int, gate: Gate) -> None:
        """The gradient of the input; those of the weights are left to `backward_for_weights`."""
        halves = self._halves[action.stage, segment_of(action)] = []

        def differentiate(graph: Graph, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, Tensors]:
            below, rest = input_gradient(graph, grad)
            halves.append(rest)
            return below, {}

        self._go_back(action, number, gate, differentiate)

    def backward_for_weights(self, action: Action, number: int, gate: Gate) -> None:
        modules, (segment, version) = self._layout.backward[action.stage], self._at(action, number)
        gradients: Tensors = {}
        for rest in self._halves.pop((action.stage, segment)):
            gradients |= weight_gradients(rest)
        self._hand_over(action.stage, segment, gradients)
        self._release(modules, version)

    def share_forward(self, action: Action, number: int, gate: Gate) -> None:
        segment, version = self._at(action, number)
        half = self._shares.forward(action.stage, segment, version)
        if self._memory is not None:
            self._memory.hold(half.exponentials, "activations")
        self._release(self._layout.shard(action.stage), version)

    def share_backward(self, action: Action, number: int, gate: Gate) -> None:
        """The second half of a shard of the head; all shards have the loss, the last one records it."""
        segment, version = self._at(action, number)
        loss, gradients = self._shares.backward(
            action.stage, segment, version, lambda loss: self._loss_scale(loss, version)
        )
        if action.stage == self._layout.num_head_shards - 1:
            self._note_loss(segment, loss)
        self._hand_over(action.stage, segment, gradients)
        self._release(self._layout.shard(action.stage), version)

    # --- transfers ---

    def store_kept(self, action: Action, copy: Move) -> None:
        """Move the kept inputs of a backward stage off their device."""
        for place in self._kept_of(action):
            self._stored[place] = copy(self._kept.pop(place))

    def load_kept(self, action: Action, copy: Move) -> None:
        """Bring the kept inputs of a backward stage to the device that recomputes."""
        for place in self._kept_of(action):
            if place in self._stored:
                self._kept[place] = copy(self._stored.pop(place))
            elif place[0] in self._layout.starts:  # it has been on the host as a boundary tensor, and still is
                self._kept[place] = copy(self._kept[place])

    def _kept_of(self, action: Action) -> list[tuple[int, Segment]]:
        segment = segment_of(action)
        modules, starts, head = self._layout.backward[action.stage], self._layout.starts, self._layout.head
        is_alone = self.recompute_head and modules.start == head
        return [
            (module, segment)
            for module in modules
            if (is_alone if module == head else module and (self._keeps_all or module in starts))
        ]

    def copy_boundary(self, action: Action, copy: Move) -> None:
        """Copy a boundary tensor: to the host with its SEND, to a device with its RECV."""
        segment = segment_of(action)
        if action.kind in (Kind.SEND_F, Kind.RECV_F):
            place = action.stage - (action.kind is Kind.RECV_F), segment
            self._outputs[place] = copy(self._outputs[place])
        else:
            place = action.stage + (action.kind is Kind.RECV_B), segment
            grad = self._grads[place]
            self._grads[place] = None if grad is None else copy(grad)

    def take_boundary(self, up: bool, stage: int, microbatch: int) -> torch.Tensor:
        """Take a stage's output (`up`), or the gradient of its input, for a stage in another process."""
        found = (self._outputs if up else self._grads).pop((stage, (microbatch, 0)))
        assert found is not None  # a stage with another below it has a gradient for it
        return found

    def put_boundary(self, up: bool, stage: int, microbatch: int, tensor: torch.Tensor) -> None:
        """Store for its reader here a tensor that `take_boundary` took in another process."""
        if up:
            self._outputs[stage, (microbatch, 0)] = tensor
        else:
            self._grads[stage, (microbatch, 0)] = tensor

    # --- what they share ---

    def recomputed(self, stage: int) -> list[range]:
        """The pieces that a backward stage recomputes, the last one first."""
        again = self._run_again(self._layout.backward[stage])
        embedding = int(stage == 0 and self._layout.keeps_embedded)  # run by itself: the layers have their own input
        return [*pieces(again[:embedding], self._grain), *pieces(again[embedding:], self._grain)]

    def _go_back(self, action: Action, number: int, gate: Gate, differentiate: Differentiate) -> Tensors:
        """Recomputation and backward of a stage; returns the gradients of its weights."""
        stage, modules = action.stage, self._layout.backward[action.stage]
        segment, version = self._at(action, number)
        again, weights = self.recomputed(stage), version
        if self._adjustments is not None:
            weights = self._adjustments.before_backward(stage, segment[0], version)
        graph = self._recomputed.pop((stage, segment), None)
        if again and graph is None:
            self._make_layer_inputs(again, segment, weights)
            graph = self._again(again[-1], segment, weights)
        gate()
        gradients: Tensors = {}
        if self._saved is not None:
            self._saved.take(action)
        kept = self._graphs.pop((stage, segment), None)
        if self._layout.head in modules:
            head = kept or self._head_again(modules[-1:], graph, segment, version)
            grad, gradients = differentiate(head, self._loss_scale(head.end, version))
        else:
            leaves_shards = stage == self._layout.top and self._layout.num_head_shards
            above = self._shares.leave(segment) if leaves_shards else self._grads.pop((stage + 1, segment))
            grad = None if above is None else here(above)
            if kept is not None:
                grad, gradients = differentiate(kept, grad)
        for run in reversed(again):
            grad, found = differentiate(graph or self._again(run, segment, weights), grad)
            gradients |= found
            graph = None
        self._hand_down(stage, segment, grad)
        if self._adjustments is not None:
            self._adjustments.after_backward(stage, weights)
        self._release(modules, version)
        if kept is not None:
            self._release(*self._held.pop((stage, segment)))
        return gradients

    def _kept_graph(
        self, stage: int, modules: range, x: torch.Tensor, segment: Segment, version: int
    ) -> tuple[Graph, torch.Tensor]:
        """A graph that lives until the backward, and its output; its ends are stand-ins where activations move."""
        if self._saved is None:
            graph = self._stages.graph(modules, x, segment, version)
            return graph, graph.end.detach()
        leaf, start = enter(x) if x.is_floating_point() else (None, x)
        with self._saved.noting(stage, segment, self._stages.tensors(modules, version)):
            graph = self._stages.graph(modules, start, segment, version)
        return graph._replace(start=leaf, end=leave(graph.end)), graph.end.detach()

    def _at(self, action: Action, number: int) -> tuple[Segment, int]:
        """Segment and weight version of an action; notes the version as read."""
        version = self.read[number, action] = self._reads.version(action, number)
        return segment_of(action), version

    def _input(self, stage: int, segment: Segment) -> torch.Tensor:
        """The input of a forward stage, or of the fused stage behind the last."""
        if stage == 0:
            return self._tokens(segment)
        return here(self._outputs.pop((stage - 1, segment)))

    def _again(self, modules: range, segment: Segment, version: int) -> Graph:
        """Run modules once more, with graph, from the input kept for them."""
        first = modules.start
        x = self._kept.pop((first, segment)) if first else self._tokens(segment)
        return self._stages.graph(modules, x, segment, version, self._segments.exchange(segment, with_graph=True))

    def _head_again(self, head: range, below: Graph | None, segment: Segment, version: int) -> Graph:
        """Run the head once more, with graph, from what the recomputed layers below it made, or its kept input."""
        if below is None:
            return self._again(head, segment, version)
        return self._stages.graph(head, below.end.detach(), segment, version)

    def _make_layer_inputs(self, again: list[range], segment: Segment, version: int) -> None:
        """Run a stage again without graph, to keep its layers' inputs, unless a forward or R has kept them."""
        last = again[-1].start
        if len(again) > 1 and (last, segment) not in self._kept:
            below = range(again[0].start, last)
            self._keep(last, segment, self._run_from_kept(below, segment, version, keeps_inner=True))

    def _run_from_kept(self, modules: range, segment: Segment, version: int, *, keeps_inner: bool) -> torch.Tensor:
        """Run modules without graph from the input kept for the first; keep those of the others if `keeps_inner`."""

        def note(module: int, value: torch.Tensor) -> None:
            if keeps_inner and module != modules.start:
                self._keep(module, segment, value)

        x = self._kept[modules.start, segment] if modules.start else self._tokens(segment)
        return self._stages.keep(modules, x, segment, version, note)

    @property
    def _keeps_all(self) -> bool:
        return self._grain == "layer" and self._layout.keeps_every == 1

    def _keep(self, module: int, segment: Segment, value: torch.Tensor) -> None:
        self._kept[module, segment] = value
        if self._memory is not None:
            self._memory.hold(value, "inputs kept to recompute from")

    def _tokens(self, segment: Segment) -> torch.Tensor:
        return self._workload.segment(*segment, self._segments.num_parts).tokens

    def _run_again(self, modules: range) -> range:
        """The modules of a stage that are recomputed: their graph does not live from forward to backward."""
        if self._recompute == "none":
            return modules[:0]
        if self._layout.head not in modules:
            return modules
        return modules[:0] if self._recompute == "except_last" else modules[:-1]

    def _hand_down(self, stage: int, segment: Segment, grad: torch.Tensor | None) -> None:
        if stage:
            self._grads[stage, segment] = grad

    def _hand_over(self, stage: int, segment: Segment, gradients: Tensors) -> None:
        microbatch, _ = segment
        self._gradients.add(stage, microbatch // self._workload.num_microbatches + 1, microbatch, gradients)

    def _note_loss(self, segment: Segment, loss: torch.Tensor) -> None:
        microbatch, part = segment
        value = float(loss.detach())
        self.losses[microbatch] = self.losses[microbatch] + value if part else value
        if not math.isfinite(value):
            raise NonFiniteLoss(
                f"the loss of microbatch {microbatch} is {value}; lower learning_rate, or set clip_norm"
            )

    def _loss_scale(self, loss: torch.Tensor, version: int) -> torch.Tensor | None:
        """The gradient of the loss, which is the loss scale; None for 1."""
        return None if self._scaler is None else torch.full_like(loss, self._scaler.of(version))

    def _release(self, modules: range, version: int) -> None:
        for module in modules:
            self._stages.weights.release(module, version)
