"""The generators from which a sampler may draw: their states, and copies that continue from loaded ones."""

from __future__ import annotations

import base64
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

_GLOBALS: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "torch": (torch.get_rng_state, torch.set_rng_state),
    "python": (random.getstate, random.setstate),
    "numpy": (np.random.get_state, np.random.set_state),  # Users' samplers draw from it.
}
"""The global generators of a process by name: how to get and to set their states."""

States = dict[str, Any]
"""States of global generators by name: those of torch's CPU generator, and of the modules random and numpy.random."""


def capture(names: Iterable[str]) -> States:
    """Return the present states of some of the process's global generators."""
    return {name: _GLOBALS[name][0]() for name in names}


class OwnGenerators:
    """Generators of a loader's own, which continue from a state that was loaded, in place of the process's.

    The generators of the process belong to the program. Where one is in the loaded state already, there is none here:
    the loader draws from the process's, as the run did that was stopped.

    Args:
        states: The states from which to continue.
        process: The states of the process's generators when the state was loaded.
    """

    def __init__(self, states: States, process: States) -> None:
        self._process = process
        self._states = {name: states[name] for name in _find_differences(states, capture(states))}

    def without_changed(self) -> OwnGenerators:
        """Return the generators whose counterpart in the process the program has not seeded, restored or used."""
        return OwnGenerators(self.cover({}), self._process)

    def cover(self, states: States) -> States:
        """Return states of the process with those from which the next epoch is drawn in their place."""
        changed = _find_differences(self._process, capture(self._states))
        return states | {name: state for name, state in self._states.items() if name not in changed}

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Draw from these generators in the block. Those of the process stay as they were."""
        before = capture(self._states)
        _apply(self._states)
        try:
            yield
        finally:
            self._states = capture(self._states)
            _apply(before)


def drawing_from(generators: OwnGenerators | None) -> AbstractContextManager[None]:
    """Return a context that draws from these generators, or from the process's."""
    return nullcontext() if generators is None else generators.drawing()


@dataclass(kw_only=True, eq=False)
class RandomStates:
    """The states of all generators from which a sampler may draw.

    Attributes:
        globals: Those of the process's global generators, without some from which it does not draw.
        own: Those of the generators that the user passed to the loader or its samplers, uint8 [n] each.
    """

    globals: States
    own: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def capture(cls, generators: Sequence[torch.Generator], *, includes_others: bool) -> RandomStates:
        """Return the present states.

        Args:
            generators: The user's generators.
            includes_others: Whether to include the generators of Python and numpy.
        """
        return cls(
            globals=capture(_GLOBALS if includes_others else ["torch"]),
            own=[generator.get_state() for generator in generators],
        )

    def encode(self) -> dict[str, Any]:
        """Return the states as JSON-serializable values."""
        python, array = self.globals.get("python"), self.globals.get("numpy")
        return {
            "torch": _encode(self.globals["torch"].numpy()),
            "python": None if python is None else [python[0], _encode(np.array(python[1], np.uint32)), python[2]],
            "numpy": None if array is None else [array[0], _encode(array[1]), *array[2:]],
            "own": [_encode(state.numpy()) for state in self.own],
        }

    @classmethod
    def decode(cls, states: dict[str, Any]) -> RandomStates:
        """Return the states that :meth:`encode` returned."""
        python, array = states["python"], states["numpy"]
        found: States = {"torch": torch.from_numpy(_decode(states["torch"], np.uint8))}
        if python is not None:
            found["python"] = python[0], tuple(_decode(python[1], np.uint32).tolist()), python[2]
        if array is not None:
            found["numpy"] = array[0], _decode(array[1], np.uint32), *array[2:]
        return cls(globals=found, own=[torch.from_numpy(_decode(state, np.uint8)) for state in states["own"]])


def _apply(states: States) -> None:
    for name, state in states.items():
        _GLOBALS[name][1](state)


def _find_differences(one: States, other: States) -> set[str]:
    """Return the names of the generators in both whose states differ."""
    return {name for name in one.keys() & other.keys() if not _are_equal(one[name], other[name])}


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one[1], np.ndarray):
        return one[0] == other[0] and np.array_equal(one[1], other[1]) and one[2:] == other[2:]
    return bool(one == other)


def _encode(array: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(zlib.compress(array.tobytes())).decode()


def _decode(text: str, dtype: Any) -> np.ndarray[Any, Any]:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype).copy()
