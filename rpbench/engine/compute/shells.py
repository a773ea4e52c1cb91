"""Shells: modules without weights, one set per thread.

A shell's module holds the given weights for the time of a call, so two threads must not share one: with streamed
weights, devices run the same layer at the same time. `torch.func.functional_call` means the same; this is it for
modules known beforehand, whose tensors need not be looked up by name each time.
"""

import copy
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn


class Shell:
    """One module to be called with any weights of its shape."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._places: dict[str, tuple[dict[str, Any], str, Any]] = {}  # name -> table, key and what is there otherwise
        for prefix, part in module.named_modules(remove_duplicate=False):
            for table in (part._parameters, part._buffers):
                for key, stand_in in table.items():
                    self._places[f"{prefix}.{key}" if prefix else key] = table, key, stand_in

    def __call__(self, tensors: Mapping[str, torch.Tensor], *inputs: Any) -> Any:
        """What the module makes of the inputs with these tensors, by name; all its weights must be there."""
        try:
            for name, tensor in tensors.items():
                table, key, _ = self._places[name]
                table[key] = tensor
            return self._module(*inputs)
        finally:
            for table, key, stand_in in self._places.values():
                table[key] = stand_in


class Shells(threading.local):
    """The modules of a model as shells of the calling thread, made when first asked for."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._made: dict[int, Shell] = {}

    def __getitem__(self, index: int) -> Shell:
        if index not in self._made:
            self._made[index] = Shell(_emptied(self._modules[index]))
        return self._made[index]


def _emptied(module: nn.Module) -> nn.Module:
    """A copy whose parameters have no values; buffers are shared, because forward does not write them."""
    stand_ins: dict[int, object] = {
        id(parameter): nn.Parameter(
            torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"), parameter.requires_grad
        )
        for parameter in module.parameters()
    }
    stand_ins |= {id(buffer): buffer for buffer in module.buffers()}
    return copy.deepcopy(module, stand_ins)
