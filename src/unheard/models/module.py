"""Makes a language model of any `torch.nn.Module` that maps tokens [B, T] to logits [B, T, V].

`ModuleModel` names a module class and its arguments, or wraps a module object. `PureModule` turns a module into a pure
function of parameters and inputs, which several threads can call.

    model = ModuleModel(module="my_package.models:Transformer", arguments={"width": 64}, vocabulary_size=10_000)
    model = ModuleModel.wrap(Transformer(width=64), vocabulary_size=10_000, weights_are_public=True)

**Weights of unknown origin.** The weights of a module object, and of a class that loads weights when it is built, may
have been trained on the users of the corpus. A run with noise refuses such weights unless they are declared public. It
records their digest.

**Threads.** `torch.func.functional_call` puts the given parameters into the module, calls it and takes them out again.
If two threads called the same module object at the same time, one thread would compute with the parameters of the
other. Therefore each concurrent call uses its own shell: a copy of the module's structure that shares the frozen
tensors with the module, so that these tensors are in memory only once.
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
"""The largest correlation between two draws of a tensor that is still attributed to chance.

The unit is the standard deviation of the correlation of independent draws, n^(-1/2) for n elements.
"""


class PureModule:
    """A module as a pure function of parameters and inputs. Several threads can call it at the same time.

    Args:
        module: The module. It is put into eval mode, and its own parameters are frozen.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module.eval().requires_grad_(False)
        self._device: torch.device | None = None
        self._moving = threading.Lock()
        self._free: deque[nn.Module] = deque()

    def __call__(self, params: Mapping[str, Tensor], *args: Any, device: torch.device, **kwargs: Any) -> Any:
        """Return the output of the module with `params` in place of its own parameters.

        Args:
            params: The parameters by name. Parameters of the module that are missing here keep their own values.
            *args: The inputs of the module.
            device: The device of the inputs, to which the module is moved.
            **kwargs: More inputs of the module.
        """
        if torch.compiler.is_compiling():  # Only CUDA engines compile, and they call the model from one thread.
            return torch.func.functional_call(self.module, dict(params), args, kwargs)
        if device != self._device:
            self._move(device)
        # DP: a shell for each call in flight, so that no user's step is computed with the parameters of another's.
        shell = self._borrow()
        output = torch.func.functional_call(shell, dict(params), args, kwargs)
        self._free.append(shell)  # After an error the shell is not reused, since it may still contain the parameters.
        return output

    def _move(self, device: torch.device) -> None:
        """Move the module to a device, and discard the shells.

        This must not happen within a torch.func transform, since the moved tensors would belong to the transform.
        Therefore engines call the model once on the device before they use a transform.
        """
        with self._moving:
            if device != self._device:
                self._free.clear()
                self.module.to(device)
                self._device = device

    def _borrow(self) -> nn.Module:
        """Return a shell of the module that no other call uses; make a new one if none is free."""
        try:
            return self._free.pop()
        except IndexError:
            return shell_of(self.module)


def shell_of(module: nn.Module, own: Collection[str] = ()) -> nn.Module:
    """Return a copy of the module's structure that shares its tensors.

    Args:
        module: The module.
        own: The names of parameters that are copied instead of shared.
    """
    copied = {id(tensor) for name, tensor in module.named_parameters() if name in own}
    held = [*module.parameters(), *module.buffers()]
    for part in module.modules():  # Modules may have tensors that are neither parameters nor buffers.
        held += [value for value in vars(part).values() if isinstance(value, Tensor)]
    return copy.deepcopy(module, {id(tensor): tensor for tensor in held if id(tensor) not in copied})


@dataclass(frozen=True, kw_only=True)
class ModuleModel(BaseModel):
    """A language model that is a torch module: the name of its class and the arguments of the class.

    The module is built once and then called in eval mode. In a private round its output must depend only on parameters
    and tokens (no dropout, no running statistics). A run checks this before it begins.

    Args:
        module: "package.file:Class". The class must be importable. A class in the working folder is imported only
            within `trusted_code`.
        arguments: Keyword arguments of the class.
        vocabulary_size: V, the last dimension of the logits.
        user_features: Must be 0; a torch module takes tokens only.
        weights_are_public: Declares that no user of the corpus contributed to the weights that the module has when it
            is built. Training with noise requires this declaration for a module object, and for a class that does not
            draw its weights from the seed.
        weights_sha256: The digest of these weights. A run fills it in when it begins. It is None for weights that are
            drawn from the seed.

    Raises:
        InvalidValue: `module` does not have the form "package.file:Class", or `user_features` is not 0.
        ModelError: The module cannot be imported, built or called. Raised when the model is first used.
        UnprovenCombination: The run has noise, the weights are not drawn from the seed, and `weights_are_public` is
            False.

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
        """Return the model of a module object. Training starts from the parameters of the object.

        The run folder records only the class of the module. To resume a run, it must be possible to import the class
        and to build it without arguments.

        Args:
            module: The module. It is copied; the copy is put into eval mode and frozen.
            vocabulary_size: V, the last dimension of the logits.
            weights_are_public: Declares that no user of the corpus contributed to the module's weights. Training with
                noise requires this declaration.
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
        """Return the model with `weights_sha256` filled in, if its weights are not drawn from the seed."""
        if self.weights_sha256 is not None or self._is_drawn:
            return self
        model = replace(self, weights_sha256=_digest_of(self._module))
        model.__dict__.update({key: value for key, value in self.__dict__.items() if key.startswith("_")})
        return model

    @cached_property
    def _is_drawn(self) -> bool:
        """Whether every weight is a constant or was drawn from the seed.

        The class is built with three seeds and the results are compared. Elements that are equal in all three were not
        drawn. All of them may have one value, such as the zeros of a bias or the ones of a norm; if they have several
        values, they were loaded or computed from an unknown source. Elements that differ but are correlated contain a
        common component that was not drawn, for example loaded weights with added noise."""
        if self.weights_sha256 is not None or "_begins_as_it_is" in self.__dict__:
            return False
        builds = [_tensors_of(self._drawn(seed)) for seed in (1, 2, 3)]
        if any(build.keys() != builds[0].keys() for build in builds):
            return False
        draws = [[build[name] for build in builds] for name in builds[0]]
        return all(_constants_are_equal(draw) and _are_uncorrelated(draw[0], draw[1]) for draw in draws)

    def _drawn(self, seed: int) -> nn.Module:
        """Return a new module of the class, with every layer drawn from the seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            fresh = self._build()
            _reset_layers(fresh)
        return fresh

    def check_store(
        self, tokens: Mapping[str, Any], vocabulary: Vocabulary, *, unrolls: Mapping[str, int], is_private: bool
    ) -> None:
        """Check the vocabulary as `BaseModel` does, and refuse weights of unknown origin in a run with noise.

        Raises:
            ModelError: The vocabularies of model and store have different sizes.
            UnprovenCombination: The run adds noise, and the weights are not drawn from the seed nor declared public.
        """
        # DP: weights that were not drawn from the seed may have seen these users without noise.
        if is_private and not self.weights_are_public and not self._is_drawn:
            raise UnprovenCombination(
                f"{self.module} begins from weights that are not drawn from the seed, so their privacy cost is "
                "unknown. If no user of the corpus contributed to the weights, set model.weights_are_public = true "
                "(Python: ModuleModel.wrap(..., weights_are_public=True)); otherwise name a class whose weights are "
                "drawn when it is built."
            )
        super().check_store(tokens, vocabulary, unrolls=unrolls, is_private=is_private)

    def origin(self) -> str | None:
        """Return in words whether the weights were declared public; None if they are drawn from the seed."""
        if self._is_drawn:
            return None
        return "a model declared public" if self.weights_are_public else "a model of unknown cost"

    def weights_digest(self) -> str | None:
        """Return the SHA-256 of the initial weights; None if they are drawn from the seed."""
        return self.weights_sha256

    @cached_property
    def _module(self) -> nn.Module:
        """The module, built with seed 0."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self._build()

    def _build(self) -> nn.Module:
        """Build a new module of the class, with torch's current random state.

        Raises:
            CodeNotTrusted: The call is within `no_code`.
            ModelError: The class cannot be imported or built, or is not a `torch.nn.Module`.
        """
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
        # The name comes from a run file, which may be hostile. Call only module classes, not for example os:system.
        if not (inspect.isclass(cls) and issubclass(cls, nn.Module)):
            raise ModelError(f"{self.module!r} is not a torch.nn.Module class.")
        try:
            return cls(**self.arguments).eval().requires_grad_(False)
        except Exception as error:  # building a class can raise anything
            raise ModelError(f"{self.module} cannot be built from [model.arguments]: {error}.") from None

    @cached_property
    def _pure(self) -> PureModule:
        """The module as a pure function."""
        return PureModule(self._module)

    @property
    def layout(self) -> Layout:
        """The names and shapes of the module's parameters, in the order of `named_parameters`."""
        return self._layout

    @cached_property
    def _layout(self) -> Layout:
        """The cached value of `layout`. Raises `ModelError` for a module without parameters."""
        parameters = dict(self._module.named_parameters())
        if not parameters:
            raise ModelError(f"{self.module} has no parameters: there is nothing to train.")
        return Layout.of(parameters)

    def initial(self, seed: int) -> Tensor:
        """Return the initial parameters [P]: those of a wrapped module object, otherwise parameters from the seed.

        Every layer with a method `reset_parameters`, which all of torch's layers have, is drawn again from the seed.
        Other parameters keep the values that the class gives them.
        """
        fresh = copy.deepcopy(self._module)
        if "_begins_as_it_is" not in self.__dict__:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                _reset_layers(fresh)
        return self.layout.join(dict(fresh.named_parameters())).detach()

    def logits(self, params: Mapping[str, Tensor], tokens_BT: Tensor, features_F: Tensor | None = None) -> Tensor:
        """Return the output of the module with the given parameters (see `LanguageModel.logits`).

        Raises:
            ModelError: The module fails on these tokens, or its output does not have the shape [B, T, V].
        """
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
    """Draw the parameters of every layer that has a method `reset_parameters`."""
    for layer in module.modules():
        if callable(reset := getattr(layer, "reset_parameters", None)):
            reset()


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return all tensors of a module by name, on the CPU: parameters, buffers and plain attributes."""
    tensors: dict[str, Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, part in module.named_modules():
        plain = {f"{name}.{key}": value for key, value in vars(part).items() if isinstance(value, Tensor)}
        tensors.update(plain)
    return {name: tensor.detach().cpu() for name, tensor in tensors.items()}


def _constants_are_equal(draws: list[Tensor]) -> bool:
    """Whether the elements that are equal in all draws of a tensor all have the same value (or there are none)."""
    first, *others = draws
    if any(other.shape != first.shape or other.dtype != first.dtype for other in others):
        return False
    # DP: element by element, so that loaded rows in a matrix of drawn rows count too. Two draws of a large matrix share
    # an element by chance now and then, three do not.
    same = torch.stack([first == other for other in others]).all(dim=0)
    return first[same].unique().numel() <= 1


def _are_uncorrelated(first: Tensor, second: Tensor) -> bool:
    """Whether the correlation between two draws of a tensor is small enough to be chance (`MAX_CORRELATION`).

    Only elements that differ are compared. The result is always True for integers, and for at most 64 such elements.
    """
    if not first.is_floating_point():
        return True
    varies = first != second
    x, y = (draw[varies].double() - draw[varies].double().mean() for draw in (first, second))
    # DP: loaded weights with some noise on them differ in every element, and are the same weights all the same. Of n
    # independent pairs the correlation is about n^(-1/2).
    return bool((x @ y).abs() <= MAX_CORRELATION / max(x.numel(), 1) ** 0.5 * x.norm() * y.norm())


def _digest_of(module: nn.Module) -> str:
    """Return the SHA-256 of the names, dtypes, shapes and contents of all tensors of a module."""
    digest = hashlib.sha256()
    for name, tensor in sorted(_tensors_of(module).items()):
        digest.update(f"{name}\n{tensor.dtype}\n{tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


_trust_code = False  # Whether classes in the working folder may be imported; `trusted_code` sets it.
_no_code = False  # Whether the import of all module classes is forbidden; `no_code` sets it.


@contextmanager
def trusted_code() -> Iterator[None]:
    """Return a context manager that allows the import of model classes from the working folder.

    A run file names the class of its model, and importing a class executes its file. Therefore nothing is imported from
    the working folder unless the caller states that the code in it can be trusted.

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
    """Return a context manager that forbids the import of model classes.

    `verify` uses it, since it examines run folders that others have written.
    """
    global _no_code
    before, _no_code = _no_code, True
    try:
        yield
    finally:
        _no_code = before


@contextmanager
def _import_path() -> Iterator[None]:
    """Add the working folder to `sys.path` if its code is trusted, and otherwise remove it, until the block ends.

    It must be removed because `python -m unheard` and interactive Python put it on the path.
    """
    here, before = os.getcwd(), list(sys.path)
    others = [entry for entry in before if os.path.realpath(entry or here) != os.path.realpath(here)]
    sys.path[:] = [here, *others] if _trust_code else others
    try:
        yield
    finally:
        sys.path[:] = before
