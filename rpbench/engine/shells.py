"""Shells: modules without weights, one set per thread.

`torch.func.functional_call` puts the given weights into the module for the time of the call, so two threads must
not share one: with streamed weights, devices run the same layer at the same time.
"""

import copy
import threading
from collections.abc import Sequence

import torch
from torch import nn


class Shells(threading.local):
    """The modules of a model as copies for the calling thread, made when first asked for."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._made: dict[int, nn.Module] = {}

    def __getitem__(self, index: int) -> nn.Module:
        if index not in self._made:
            self._made[index] = _emptied(self._modules[index])
        return self._made[index]


def _emptied(module: nn.Module) -> nn.Module:
    """A copy whose parameters have no values; buffers are shared, because forward does not write them."""
    stand_ins: dict[int, object] = {
        id(parameter): nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        for parameter in module.parameters()
    }
    stand_ins |= {id(buffer): buffer for buffer in module.buffers()}
    return copy.deepcopy(module, stand_ins)
