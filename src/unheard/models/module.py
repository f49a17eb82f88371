"""Any torch.nn.Module from tokens [B, T] to logits [B, T, V], made into a pure function by torch.func.

In: the module as you wrote it, by name or in hand. Out: a LanguageModel for either engine.
A torch module as a pure function: parameters and inputs in, outputs out, the same from every thread.

torch.func.functional_call puts the parameters into the module while it runs, and takes them out again. Two threads that call one
module would meet in it, and one chunk of users would be computed with another's parameters. So every call in flight has a shell
of its own: the same structure around the same frozen tensors, which take no memory twice.
"""

import copy
import importlib
import inspect
import os
import sys
import threading
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from unheard.config import require
from unheard.errors import ModelError
from unheard.models.model import BaseModel
from unheard.parameters import Layout


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


@dataclass(frozen=True, kw_only=True)
class ModuleModel(BaseModel):
    """A module class by name, `package.file:Class`, with its arguments. It is built once and then only called, in eval mode:
    what a private round computes must be a function of parameters and tokens alone (no dropout, no running statistics)."""

    module: str
    arguments: dict[str, Any] = field(default_factory=dict)
    vocabulary_size: int
    user_features: int = 0

    def __post_init__(self) -> None:
        require(self.module.count(":") == 1, f"module must read 'package.file:Class', not {self.module!r}.")
        require(self.user_features == 0, "a torch module takes tokens only; user_features needs kind 'tied_lstm'.")

    def __hash__(self) -> int:
        return hash((self.module, self.vocabulary_size))

    @classmethod
    def wrap(cls, module: nn.Module, *, vocabulary_size: int) -> "ModuleModel":
        """A module that you already have in your hands. A run folder records its class; to resume, it must be importable."""
        kind = type(module)
        model = cls(module=f"{kind.__module__}:{kind.__qualname__}", vocabulary_size=vocabulary_size)
        model.__dict__["_module"] = copy.deepcopy(module).eval().requires_grad_(False)
        model.__dict__["_begins_as_it_is"] = True
        return model

    @cached_property
    def _module(self) -> nn.Module:
        path, _, name = self.module.partition(":")
        try:
            with _working_folder_importable():
                cls = getattr(importlib.import_module(path), name)
        except Exception as error:  # whatever the file does when it is imported
            raise ModelError(
                f"No module class at {self.module!r} ({error}). Install it, or run from its folder."
            ) from None
        # A run file names code to call; only module classes may be called, so that a hostile file cannot name os:system.
        if not (inspect.isclass(cls) and issubclass(cls, nn.Module)):
            raise ModelError(f"{self.module!r} is not a torch.nn.Module class.")
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                return cls(**self.arguments).eval().requires_grad_(False)
        except Exception as error:  # whatever the class does with its arguments
            raise ModelError(f"{self.module} cannot be built from [model.arguments]: {error}.") from None

    @cached_property
    def _pure(self) -> PureModule:
        return PureModule(self._module)

    @property
    def layout(self) -> Layout:
        return self._layout

    @cached_property
    def _layout(self) -> Layout:
        parameters = dict(self._module.named_parameters())
        if not parameters:
            raise ModelError(f"{self.module} has no parameters: there is nothing to train.")
        return Layout.of(parameters)

    def initial(self, seed: int) -> Tensor:
        """Of a module in hand, its parameters as they are. Of one by name, its own initialisation, drawn from the seed by each
        layer that has `reset_parameters` (all of torch's have); other parameters start as the class makes them."""
        fresh = copy.deepcopy(self._module)
        if "_begins_as_it_is" in self.__dict__:
            return self.layout.join(dict(fresh.named_parameters())).detach()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for layer in fresh.modules():
                if callable(reset := getattr(layer, "reset_parameters", None)):
                    reset()
        return self.layout.join(dict(fresh.named_parameters())).detach()

    def logits(self, params: Mapping[str, Tensor], tokens_BT: Tensor, features_F: Tensor | None = None) -> Tensor:
        try:
            logits_BTV = self._pure(params, tokens_BT, device=tokens_BT.device)
        except (IndexError, ValueError, TypeError, RuntimeError) as error:
            raise ModelError(f"{self.module} fails on tokens of shape {tuple(tokens_BT.shape)}: {error}.") from error
        if logits_BTV.shape != (*tokens_BT.shape, self.vocabulary_size):
            raise ModelError(
                f"{self.module} gave logits of shape {tuple(logits_BTV.shape)} for tokens {tuple(tokens_BT.shape)}; "
                f"{(*tokens_BT.shape, self.vocabulary_size)} was expected."
            )
        return logits_BTV


@contextmanager
def _working_folder_importable() -> Iterator[None]:
    """As `python -m` would have it; an installed script starts without."""
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)
