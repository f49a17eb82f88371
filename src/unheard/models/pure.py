"""A torch module as a pure function: parameters and inputs in, outputs out, the same from every thread.

torch.func.functional_call puts the parameters into the module while it runs, and takes them out again. Two threads that call one
module would meet in it, and one chunk of users would be computed with another's parameters. So every call in flight has a shell
of its own: the same structure around the same frozen tensors, which take no memory twice.
"""

import copy
import threading
from collections import deque
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn


class PureModule:
    """The module in eval mode, without gradients of its own: nothing draws, nothing is remembered, nothing is trained in place."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module.eval().requires_grad_(False)
        self._device: torch.device | None = None
        self._moving = threading.Lock()
        self._free: deque[nn.Module] = deque()

    def __call__(self, params: Mapping[str, Tensor], *args: Any, device: torch.device, **kwargs: Any) -> Any:
        """The module's output with `params` in place of its own; what they do not name stays as it is, on `device`."""
        if torch.compiler.is_compiling():  # on CUDA, where one thread does all the work
            return torch.func.functional_call(self.module, dict(params), args, kwargs)
        if device != self._device:
            self._move(device)
        # DP: a shell for each call in flight, so that no user's step is computed with the parameters of another's.
        shell = self._borrow()
        answer = torch.func.functional_call(shell, dict(params), args, kwargs)
        self._free.append(shell)  # after an error it is not given back: parameters may be left in it
        return answer

    def _move(self, device: torch.device) -> None:
        """Never within a torch.func transform, where a moved tensor would belong to the transform: engines call plainly first."""
        with self._moving:
            if device != self._device:
                self._free.clear()
                self.module.to(device)
                self._device = device

    def _borrow(self) -> nn.Module:
        try:
            return self._free.pop()
        except IndexError:
            return shell_of(self.module)


def shell_of(module: nn.Module, own: Collection[str] = ()) -> nn.Module:
    """The module's structure copied and its tensors shared, except the parameters named in `own`, which are copied too."""
    copied = {id(tensor) for name, tensor in module.named_parameters() if name in own}
    held = [*module.parameters(), *module.buffers()]
    for part in module.modules():  # tensors that a module keeps beside its parameters and buffers
        held += [value for value in vars(part).values() if isinstance(value, Tensor)]
    return copy.deepcopy(module, {id(tensor): tensor for tensor in held if id(tensor) not in copied})
