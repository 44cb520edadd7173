"""Transforms by name, for the options ``--recipe`` and ``--transform``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

from shardio.functions import load_function
from shardio.transforms.recipes import RECIPES


def make_transform(recipe: str | None, transform: str | None, size: int | None) -> Callable[[Any], Any]:
    """Make the transform that ``--recipe`` or ``--transform`` names.

    ``--transform`` names a transform of any library, or a function of an image, as ``package.module:name`` or
    ``path/to/file.py:name``. A class, or a function that can be called without arguments or with only a ``size``, is
    called: its result is the transform. It gets ``size`` if it has a parameter of this name.

    Args:
        recipe: A name in RECIPES, or None.
        transform: The name of the user's own transform, or None.
        size: The size of the images in pixels; None for the default of the recipe or function.

    Raises:
        ValueError: If not exactly one of the names is given, or there is no such transform.
    """
    if recipe is not None and transform is None:
        return _make_recipe(recipe, size)
    if transform is not None and recipe is None:
        return _make_own(transform, size)
    raise ValueError(f"pass either --recipe or --transform. The recipes are {', '.join(RECIPES)}")


def _make_recipe(name: str, size: int | None) -> Callable[[Any], Any]:
    if name not in RECIPES:
        near = get_close_matches(name, RECIPES)
        meant = f"did you mean {' or '.join(near)}? " if near else ""
        raise ValueError(f"there is no recipe {name!r}: {meant}The recipes are {', '.join(RECIPES)}")
    make: Callable[..., Callable[[Any], Any]] = RECIPES[name]
    return make() if size is None else make(size)


def _make_own(name: str, size: int | None) -> Callable[[Any], Any]:
    try:
        found = load_function(name)
    except ValueError as error:
        raise ValueError(f"there is no transform {name!r}: {error}") from error
    if not inspect.isclass(found) and not inspect.isfunction(found):
        return found
    parameters = inspect.signature(found).parameters
    required = {key for key, parameter in parameters.items() if _is_required(parameter)}
    if inspect.isfunction(found) and not required <= {"size"}:
        return found
    offered = {} if size is None or "size" not in parameters else {"size": size}
    if missing := sorted(required - set(offered)):
        raise ValueError(
            f"{name} needs values for {', '.join(missing)}: name a function that returns the finished transform"
            f"{', or pass a size' if missing == ['size'] else ''}"
        )
    made = found(**offered)
    if not callable(made):
        raise ValueError(f"{name} must return a transform, which is callable, but it returned {type(made).__name__}")
    return made  # type: ignore[no-any-return]  # mypy does not narrow Any by callable().


def _is_required(parameter: inspect.Parameter) -> bool:
    """Return whether a call needs this parameter. That holds for ``*args``, which a transform's wrapper may have."""
    return parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
