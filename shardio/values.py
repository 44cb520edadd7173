"""Setting values as people give them: integers, truth values, choices. The one place where they become Python's own."""

from __future__ import annotations

import numbers
import operator
from typing import Any, SupportsIndex, get_args


def check_integer(name: str, value: SupportsIndex, *, at_least: int | None = None, below: int | None = None) -> int:
    """Return an integer setting as Python's int, whichever library's integer it is.

    States and checkpoints hold settings. JSON and ``torch.load(weights_only=True)`` read Python's integers alone.

    >>> check_integer("seed", 7, at_least=0)
    7

    Args:
        name: Of the setting, for messages.
        value: An integer of Python, numpy or torch. Truth values and floats are not integers.
        at_least: The lowest that is allowed, if there is one.
        below: The first that is too high, if there is one.

    Raises:
        TypeError: If it is not an integer.
        ValueError: If it is out of range.
    """
    try:
        number = operator.index(value)
    except (TypeError, ValueError):  # Arrays and tensors of several values, and of floats.
        number = None
    if number is None or isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool"):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if (at_least is not None and number < at_least) or (below is not None and number >= below):
        bounds = [] if at_least is None else [f"at least {at_least}"]
        bounds += [] if below is None else [f"below {_readable(below)}"]
        raise ValueError(f"{name} must be {' and '.join(bounds)}, got {number}")
    return number


def check_optional_integer(
    name: str, value: SupportsIndex | None, *, at_least: int | None = None, below: int | None = None
) -> int | None:
    """Return None for a setting that was left open, and otherwise what :func:`check_integer` does."""
    return None if value is None else check_integer(name, value, at_least=at_least, below=below)


def check_flag(name: str, value: object) -> bool:
    """Return a setting that is on or off as Python's bool. The string "False" is neither.

    Raises:
        TypeError: If it is not a truth value of Python, numpy or torch, nor 0 or 1.
    """
    kind = str(getattr(value, "dtype", type(value).__name__))
    if kind not in ("bool", "torch.bool", "int") or bool(getattr(value, "ndim", 0)) or value not in (0, 1):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def check_plain(name: str, value: object) -> float | str:
    """Return a number or a string of any library as Python's int, float, bool or str.

    >>> from fractions import Fraction
    >>> check_plain("ratio", Fraction(3, 4))
    0.75

    Args:
        name: Of the setting, for messages.
        value: A number or a string of Python or numpy, or a tensor that holds one number and has no dimensions.

    Raises:
        TypeError: If it is anything else.
    """
    plain = value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value
    if isinstance(plain, bool):
        return plain
    if isinstance(plain, str):
        return str.__str__(plain)
    if isinstance(plain, numbers.Integral):
        return operator.index(plain)
    if isinstance(plain, numbers.Real):
        return float(plain)
    raise TypeError(f"{name} must be a number or a string, got {value!r}")


def check_choice(name: str, value: object, choices: Any) -> Any:
    """Return the choice, a Python string, that equals a setting.

    >>> from typing import Literal
    >>> check_choice("verify", "first", Literal["first", "off"])
    'first'

    Args:
        name: Of the setting, for messages.
        value: The setting.
        choices: A Literal of strings.

    Raises:
        ValueError: If it is not one of them.
    """
    for choice in get_args(choices):
        if value == choice:
            return choice
    raise ValueError(f"{name} must be one of {', '.join(map(repr, get_args(choices)))}, got {value!r}")


def _readable(bound: int) -> str:
    """Return a number, large powers of two as such."""
    return f"2**{bound.bit_length() - 1}" if bound > 2**20 and bound & (bound - 1) == 0 else str(bound)
