"""The generators from which a sampler may draw: their states, and a way to draw from a copy of them."""

from __future__ import annotations

import base64
import random
import zlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch


@dataclass(kw_only=True, eq=False)
class GlobalStates:
    """The states of a process's global generators.

    Attributes:
        torch_state: That of torch's CPU generator, uint8 [n].
        python_state: That of the module ``random``; None if it was not captured.
        numpy_state: That of the module ``numpy.random``; None if it was not captured.
    """

    torch_state: torch.Tensor
    python_state: Any = None
    numpy_state: Any = None

    @classmethod
    def capture(cls, *, includes_others: bool) -> GlobalStates:
        """Return the present states."""
        states = cls(torch_state=torch.get_rng_state())
        if includes_others:
            states.python_state = random.getstate()
            states.numpy_state = np.random.get_state()  # People's samplers draw from it.
        return states

    def apply(self) -> None:
        """Set the generators to these states."""
        torch.set_rng_state(self.torch_state)
        if self.python_state is not None:
            random.setstate(self.python_state)
        if self.numpy_state is not None:
            np.random.set_state(self.numpy_state)

    def copy(self) -> GlobalStates:
        """Return a copy, which draws do not change."""
        return GlobalStates(torch_state=self.torch_state, python_state=self.python_state, numpy_state=self.numpy_state)

    @staticmethod
    def drawing_from(states: GlobalStates | None) -> AbstractContextManager[None]:
        """Return a context that draws from these states, or from the generators themselves."""
        return nullcontext() if states is None else states.drawing()

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Draw from copies of the generators in the block. These states follow; the generators stay as they were."""
        includes_others = self.python_state is not None
        before = GlobalStates.capture(includes_others=includes_others)
        self.apply()
        try:
            yield
        finally:
            after = GlobalStates.capture(includes_others=includes_others)
            self.torch_state, self.python_state, self.numpy_state = (
                after.torch_state,
                after.python_state,
                after.numpy_state,
            )
            before.apply()


@dataclass(kw_only=True, eq=False)
class RandomStates:
    """The states of all generators from which a sampler may draw.

    Attributes:
        globals: Those of the process's global generators.
        own: Those of the generators that the user passed to the loader or its samplers, uint8 [n] each.
    """

    globals: GlobalStates
    own: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def capture(cls, generators: Sequence[torch.Generator], *, includes_others: bool) -> RandomStates:
        """Return the present states.

        Args:
            generators: The user's generators.
            includes_others: Whether to include the generators of Python and numpy.
        """
        return cls(
            globals=GlobalStates.capture(includes_others=includes_others),
            own=[generator.get_state() for generator in generators],
        )

    def encode(self) -> dict[str, Any]:
        """Return the states as JSON-serializable values."""
        python, array = self.globals.python_state, self.globals.numpy_state
        return {
            "torch": _encode(self.globals.torch_state.numpy()),
            "python": None if python is None else [python[0], _encode(np.array(python[1], np.uint32)), python[2]],
            "numpy": None if array is None else [array[0], _encode(array[1]), *array[2:]],
            "own": [_encode(state.numpy()) for state in self.own],
        }

    @classmethod
    def decode(cls, states: dict[str, Any]) -> RandomStates:
        """Return the states that :meth:`encode` returned."""
        python, array = states["python"], states["numpy"]
        return cls(
            globals=GlobalStates(
                torch_state=torch.from_numpy(_decode(states["torch"], np.uint8)),
                python_state=None
                if python is None
                else (python[0], tuple(_decode(python[1], np.uint32).tolist()), python[2]),
                numpy_state=None if array is None else (array[0], _decode(array[1], np.uint32), *array[2:]),
            ),
            own=[torch.from_numpy(_decode(state, np.uint8)) for state in states["own"]],
        )


def _encode(array: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(zlib.compress(array.tobytes())).decode()


def _decode(text: str, dtype: Any) -> np.ndarray[Any, Any]:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype).copy()
