"""Any `torch.nn.Module` from tokens [B, T] to logits [B, T, V] as a language model.

`ModuleModel` names a module class with its arguments, or wraps a module object. `PureModule` makes a module a pure
function of parameters and inputs that several threads can call.

    model = ModuleModel(module="my_package.models:Transformer", arguments={"width": 64}, vocabulary_size=10_000)
    model = ModuleModel.wrap(Transformer(width=64), vocabulary_size=10_000, weights_are_public=True)

A module object, and a class that loads weights when it is built, begin from weights of unknown origin: they may have
seen the users of the corpus. A run with noise refuses them unless they are declared public, and records their digest.

`torch.func.functional_call` puts the parameters into the module while it runs and takes them out again. If two threads
called the same module object, one chunk of users would be computed with the parameters of another. Therefore every
concurrent call has a copy of the module's structure that shares the frozen tensors, so that they are in memory once.
"""

import copy
import hashlib
import importlib
import inspect
import os
import sys
import threading
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from unheard.config import require
from unheard.corpus.vocabulary import Vocabulary
from unheard.errors import CodeNotTrusted, ModelError, UnprovenCombination
from unheard.models.model import BaseModel
from unheard.parameters import Layout

MAX_CORRELATION = 8.0
"""The largest correlation of two draws of a tensor, in standard deviations of that of independent draws."""


class PureModule:
    """A module as a pure function: in eval mode and without gradients of its own parameters.

    Args:
        module: Put into eval mode and frozen.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module.eval().requires_grad_(False)
        self._device: torch.device | None = None
        self._moving = threading.Lock()
        self._free: deque[nn.Module] = deque()

    def __call__(self, params: Mapping[str, Tensor], *args: Any, device: torch.device, **kwargs: Any) -> Any:
        """The module's output with `params` in place of its own parameters; those not in `params` keep their values."""
        if torch.compiler.is_compiling():  # on CUDA, where one thread does all the work
            return torch.func.functional_call(self.module, dict(params), args, kwargs)
        if device != self._device:
            self._move(device)
        # DP: a shell for each call in flight, so that no user's step is computed with the parameters of another's.
        shell = self._borrow()
        output = torch.func.functional_call(shell, dict(params), args, kwargs)
        self._free.append(shell)  # not after an error, which may leave parameters in the shell
        return output

    def _move(self, device: torch.device) -> None:
        """Move the module to a device.

        Never within a torch.func transform, where a moved tensor would belong to the transform: engines call the model
        once outside of any transform first.
        """
        with self._moving:
            if device != self._device:
                self._free.clear()
                self.module.to(device)
                self._device = device

    def _borrow(self) -> nn.Module:
        """A shell that no other call uses."""
        try:
            return self._free.pop()
        except IndexError:
            return shell_of(self.module)


def shell_of(module: nn.Module, own: Collection[str] = ()) -> nn.Module:
    """A copy of the module's structure that shares its tensors. Only the parameters named in `own` are copied."""
    copied = {id(tensor) for name, tensor in module.named_parameters() if name in own}
    held = [*module.parameters(), *module.buffers()]
    for part in module.modules():  # tensors that are neither parameters nor buffers
        held += [value for value in vars(part).values() if isinstance(value, Tensor)]
    return copy.deepcopy(module, {id(tensor): tensor for tensor in held if id(tensor) not in copied})


@dataclass(frozen=True, kw_only=True)
class ModuleModel(BaseModel):
    """A torch module class by name, with its arguments.

    The module is built once and then only called, in eval mode: what a private round computes must be a function of
    parameters and tokens alone (no dropout, no running statistics). A run checks that before it begins.

    Args:
        module: "package.file:Class"; the class must be importable. It may lie in the working folder within `trusted_code`.
        arguments: Keyword arguments of the class.
        vocabulary_size: V, the last dimension of the logits.
        user_features: Must be 0; a torch module takes tokens only.
        weights_are_public: Declares that no user of the corpus contributed to the weights that the module holds when it
            is built. Training with noise needs it for a module object and for a class that does not draw its weights
            from the seed.
        weights_sha256: The digest of those weights. A run fills it in when it begins; None for weights that are drawn
            from the seed.

    Raises:
        InvalidValue: For a malformed `module`.
        ModelError: When the module is first used, if it cannot be imported, built or called.
        UnprovenCombination: By a run with noise, if the weights are not drawn from the seed and `weights_are_public` is
            not set.

    Example:
        >>> import unheard
        >>> unheard.ModuleModel(module="small_transformer:SmallTransformer", vocabulary_size=10_000).module
        'small_transformer:SmallTransformer'
    """

    module: str
    arguments: dict[str, Any] = field(default_factory=dict)
    vocabulary_size: int
    user_features: int = 0
    weights_are_public: bool = False
    weights_sha256: str | None = None

    def __post_init__(self) -> None:
        require(self.module.count(":") == 1, f"module must read 'package.file:Class', not {self.module!r}.")
        require(self.user_features == 0, "a torch module takes tokens only; user_features needs kind 'tied_lstm'.")

    def __hash__(self) -> int:
        return hash((self.module, self.vocabulary_size))

    @classmethod
    def wrap(cls, module: nn.Module, *, vocabulary_size: int, weights_are_public: bool = False) -> "ModuleModel":
        """The model of a module object. Its parameters are the first parameters of a run.

        The run folder records the module's class; to resume, the class must be importable and buildable without
        arguments.

        Args:
            module: Copied, put into eval mode and frozen.
            vocabulary_size: V, the last dimension of the logits.
            weights_are_public: Declares that no user of the corpus contributed to the module's weights. Training with
                noise needs it.
        """
        kind = type(module)
        model = cls(
            module=f"{kind.__module__}:{kind.__qualname__}",
            vocabulary_size=vocabulary_size,
            weights_are_public=weights_are_public,
        )
        model.__dict__["_module"] = copy.deepcopy(module).eval().requires_grad_(False)
        model.__dict__["_begins_as_it_is"] = True
        return model

    def pinned(self, vocabulary_size: int | None = None) -> "ModuleModel":
        """The model with the digest of its weights, if they are not drawn from the seed."""
        if self.weights_sha256 is not None or self._is_drawn:
            return self
        model = replace(self, weights_sha256=_digest_of(self._module))
        model.__dict__.update({key: value for key, value in self.__dict__.items() if key.startswith("_")})
        return model

    @cached_property
    def _is_drawn(self) -> bool:
        """Whether every weight is a constant or a function of the seed.

        The class is built with three seeds. Numbers that are the same in all three were not drawn; unless they are one
        constant (zeros of a bias, ones of a norm), they were loaded or computed, and nobody can say from what. Draws that
        are correlated have something in common that was not drawn: loaded weights with noise, or times a factor."""
        if self.weights_sha256 is not None or "_begins_as_it_is" in self.__dict__:
            return False
        builds = [_tensors_of(self._drawn(seed)) for seed in (1, 2, 3)]
        if any(build.keys() != builds[0].keys() for build in builds):
            return False
        draws = [[build[name] for build in builds] for name in builds[0]]
        return all(_no_constant_but_one(draw) and _are_uncorrelated(draw[0], draw[1]) for draw in draws)

    def _drawn(self, seed: int) -> nn.Module:
        """A new module of the class, with every layer drawn from the seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            fresh = self._build()
            _reset_layers(fresh)
        return fresh

    def check_store(
        self, tokens: Mapping[str, Any], vocabulary: Vocabulary, *, unrolls: Mapping[str, int], is_private: bool
    ) -> None:
        """Check the vocabulary as `BaseModel` does, and that weights of unknown origin are not used with noise."""
        # DP: weights that were not drawn from the seed may have seen these users without noise.
        if is_private and not self.weights_are_public and not self._is_drawn:
            raise UnprovenCombination(
                f"{self.module} begins from weights that are not drawn from the seed: nobody can say what they cost "
                "these users. If none of them had a part in the weights, set model.weights_are_public = true (Python: "
                "ModuleModel.wrap(..., weights_are_public=True)); else name a class whose weights are drawn when it is "
                "built."
            )
        super().check_store(tokens, vocabulary, unrolls=unrolls, is_private=is_private)

    def origin(self) -> str | None:
        """Whether the weights were declared public, in words for the statement."""
        if self._is_drawn:
            return None
        return "a model declared public" if self.weights_are_public else "a model of unknown cost"

    def weights_digest(self) -> str | None:
        """The SHA-256 of the initial weights."""
        return self.weights_sha256

    @cached_property
    def _module(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self._build()

    def _build(self) -> nn.Module:
        """A new module of the class, from its arguments and torch's current seed."""
        path, _, name = self.module.partition(":")
        if _no_code:
            raise CodeNotTrusted(f"{self.module} is a class of the user's own code, which is not imported here.")
        try:
            with _import_path():
                cls = getattr(importlib.import_module(path), name)
        except Exception as error:  # importing a file can raise anything
            raise ModelError(
                f"No module class at {self.module!r} ({error}). Install it, name its folder in PYTHONPATH, or, if it lies "
                "in the working folder and you trust it, allow that with --trust-code (Python: unheard.trusted_code())."
            ) from None
        # A run file names code to call. Only module classes may be called, so that a hostile file cannot name
        # os:system.
        if not (inspect.isclass(cls) and issubclass(cls, nn.Module)):
            raise ModelError(f"{self.module!r} is not a torch.nn.Module class.")
        try:
            return cls(**self.arguments).eval().requires_grad_(False)
        except Exception as error:  # building a class can raise anything
            raise ModelError(f"{self.module} cannot be built from [model.arguments]: {error}.") from None

    @cached_property
    def _pure(self) -> PureModule:
        return PureModule(self._module)

    @property
    def layout(self) -> Layout:
        """The parameters of the module in the order of `named_parameters`."""
        return self._layout

    @cached_property
    def _layout(self) -> Layout:
        parameters = dict(self._module.named_parameters())
        if not parameters:
            raise ModelError(f"{self.module} has no parameters: there is nothing to train.")
        return Layout.of(parameters)

    def initial(self, seed: int) -> Tensor:
        """The first parameters: those of a wrapped module object, else the layers' initialisation, drawn from the seed.

        Every layer with `reset_parameters` (all of torch's layers have it) is drawn; other parameters keep the values
        that the class gives them.
        """
        fresh = copy.deepcopy(self._module)
        if "_begins_as_it_is" in self.__dict__:
            return self.layout.join(dict(fresh.named_parameters())).detach()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            _reset_layers(fresh)
        return self.layout.join(dict(fresh.named_parameters())).detach()

    def logits(self, params: Mapping[str, Tensor], tokens_BT: Tensor, features_F: Tensor | None = None) -> Tensor:
        """The scores of the module, called with the given parameters (see `LanguageModel.logits`)."""
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


def _reset_layers(module: nn.Module) -> None:
    """Draw the parameters of every layer that can draw its own."""
    for layer in module.modules():
        if callable(reset := getattr(layer, "reset_parameters", None)):
            reset()


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """All tensors that the module holds, by name: parameters, buffers and plain attributes."""
    tensors: dict[str, Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, part in module.named_modules():
        plain = {f"{name}.{key}": value for key, value in vars(part).items() if isinstance(value, Tensor)}
        tensors.update(plain)
    return {name: tensor.detach().cpu() for name, tensor in tensors.items()}


def _no_constant_but_one(draws: list[Tensor]) -> bool:
    """Whether the elements that are the same in all draws are all one number."""
    first, *others = draws
    if any(other.shape != first.shape or other.dtype != first.dtype for other in others):
        return False
    # DP: element by element, so that loaded rows in a matrix of drawn rows count too. Two draws of a large matrix share
    # an element by chance now and then, three do not.
    same = torch.stack([first == other for other in others]).all(dim=0)
    return first[same].unique().numel() <= 1


def _are_uncorrelated(first: Tensor, second: Tensor) -> bool:
    """Whether two draws of a tensor are uncorrelated; a tensor of few numbers is taken to be so."""
    if not first.is_floating_point():
        return True
    varies = first != second
    x, y = (draw[varies].double() - draw[varies].double().mean() for draw in (first, second))
    # DP: loaded weights with some noise on them differ in every element, and are the same weights all the same. Of n
    # independent pairs the correlation is about n^(-1/2).
    return bool((x @ y).abs() <= MAX_CORRELATION / max(x.numel(), 1) ** 0.5 * x.norm() * y.norm())


def _digest_of(module: nn.Module) -> str:
    """The SHA-256 of the names, shapes and contents of all tensors of a module."""
    digest = hashlib.sha256()
    for name, tensor in sorted(_tensors_of(module).items()):
        digest.update(f"{name}\n{tensor.dtype}\n{tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


_trust_code = False
_no_code = False


@contextmanager
def trusted_code() -> Iterator[None]:
    """Allow models to be imported from the working folder.

    A run file names the class of its model, and importing a class executes its file. Therefore nothing is imported from
    the working folder unless the caller trusts the code in it.

    Example:
        >>> import unheard
        >>> with unheard.trusted_code():
        ...     released = unheard.Released.open("runs/first")
    """
    global _trust_code
    before, _trust_code = _trust_code, True
    try:
        yield
    finally:
        _trust_code = before


@contextmanager
def no_code() -> Iterator[None]:
    """Forbid the import of any model: for `verify`, which examines run folders of others."""
    global _no_code
    before, _no_code = _no_code, True
    try:
        yield
    finally:
        _no_code = before


@contextmanager
def _import_path() -> Iterator[None]:
    """Put the working folder on the path of imports if its code is trusted, else take it off.

    `python -m unheard` and an interactive Python have it on the path.
    """
    here, before = os.getcwd(), list(sys.path)
    others = [entry for entry in before if os.path.realpath(entry or here) != os.path.realpath(here)]
    sys.path[:] = [here, *others] if _trust_code else others
    try:
        yield
    finally:
        sys.path[:] = before
