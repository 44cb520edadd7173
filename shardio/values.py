"""Check and convert settings: integers, flags, choices, sizes, JSON and the names of functions."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import numbers
import operator
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, SupportsIndex, get_args


def check_integer(name: str, value: SupportsIndex, *, at_least: int | None = None, below: int | None = None) -> int:
    """Return an integer from any library as a Python int.

    Settings are saved in states and checkpoints. JSON and ``torch.load(weights_only=True)`` accept only Python's
    integers.

    >>> check_integer("seed", 7, at_least=0)
    7

    Args:
        name: The name of the setting, for messages.
        value: A Python, numpy or torch integer. Booleans and floats are not integers.
        at_least: The inclusive lower bound, if there is one.
        below: The exclusive upper bound, if there is one.

    Raises:
        TypeError: If the value is not an integer.
        ValueError: If the value is out of range.
    """
    is_bool = isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool")
    try:
        number = None if is_bool else operator.index(value)
    except (TypeError, ValueError):  # The value is, for example, a float or an array of several values.
        number = None
    if number is None:
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if (at_least is not None and number < at_least) or (below is not None and number >= below):
        bounds = [] if at_least is None else [f"at least {at_least}"]
        bounds += [] if below is None else [f"below {_readable(below)}"]
        raise ValueError(f"{name} must be {' and '.join(bounds)}, got {number}")
    return number


def check_optional_integer(
    name: str, value: SupportsIndex | None, *, at_least: int | None = None, below: int | None = None
) -> int | None:
    """Return the result of :func:`check_integer`, or None if the value is None."""
    return None if value is None else check_integer(name, value, at_least=at_least, below=below)


def check_flag(name: str, value: object) -> bool:
    """Return an on/off setting as a Python bool. The string "False" is not accepted.

    Raises:
        TypeError: If the value is neither a Python, numpy or torch boolean nor 0 or 1.
    """
    kind = str(getattr(value, "dtype", type(value).__name__))
    if kind not in ("bool", "torch.bool", "int") or bool(getattr(value, "ndim", 0)) or value not in (0, 1):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def check_text(name: str, value: object) -> str:
    """Return a string as a Python str.

    Raises:
        TypeError: If the value is not a string.
    """
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, got {value!r}")
    return str.__str__(value)


def check_plain(name: str, value: object) -> float | str:
    """Return a number or a string from any library as a Python int, float, bool or str.

    >>> from fractions import Fraction
    >>> check_plain("ratio", Fraction(3, 4))
    0.75

    Args:
        name: The name of the setting, for messages.
        value: A Python or numpy number or string, or a 0-dimensional tensor.

    Raises:
        TypeError: If the value is anything else.
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


def check_seconds(name: str, value: object) -> float:
    """Return a time in seconds as a Python float.

    Raises:
        TypeError: If the value is neither a number nor a string.
        ValueError: If the value is not a positive, finite number.
    """
    number = check_plain(name, value)
    if isinstance(number, str | bool) or not 0 < number < math.inf:
        raise ValueError(f"{name} must be a positive number of seconds, got {value!r}")
    return float(number)


def check_choice(name: str, value: object, choices: Any) -> Any:
    """Return the choice that equals a setting, as a Python str.

    >>> from typing import Literal
    >>> check_choice("verify", "first", Literal["first", "off"])
    'first'

    Args:
        name: The name of the setting, for messages.
        value: The setting.
        choices: A Literal of strings.

    Raises:
        ValueError: If the setting is not one of the choices.
    """
    for choice in get_args(choices):
        if value == choice:
            return choice
    raise ValueError(f"{name} must be one of {', '.join(map(repr, get_args(choices)))}, got {value!r}")


def parse_size(name: str, size: str | int) -> int:
    """Return a number of bytes.

    >>> parse_size("max_shard_size", "256MiB")
    268435456

    Args:
        name: The name of the setting, for messages.
        size: A number of bytes, or text such as ``256MiB`` or ``1GB``.

    Raises:
        TypeError: If the size is neither an integer nor text.
        ValueError: If the text is not a size, or the size is not at least 1.
    """
    if isinstance(size, str):
        from pydantic import ByteSize, TypeAdapter, ValidationError

        try:
            size = int(TypeAdapter(ByteSize).validate_python(size))
        except ValidationError as error:
            raise ValueError(
                f"{name} must be a size such as '256MiB' or '1GB', or a number of bytes, got {size!r}"
            ) from error
    return check_integer(name, size, at_least=1)


def _readable(bound: int) -> str:
    return f"2**{bound.bit_length() - 1}" if bound > 2**20 and bound & (bound - 1) == 0 else str(bound)


def parse_json(content: bytes | str) -> Any:
    """Parse a JSON text and return its value.

    Args:
        content: The text, as a string or in UTF-8.

    Raises:
        ValueError: If the text is not JSON in UTF-8 (RFC 8259), holds NaN or an infinity, is nested too deeply, or has
            an object with a duplicate name, which parsers interpret differently.
    """
    text = content if isinstance(content, str) else content.decode("utf-8-sig")
    try:
        return json.loads(text, object_pairs_hook=_make_object, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("lists or objects are nested too deeply") from error


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        name = next(name for name, number in Counter(name for name, _ in pairs).items() if number > 1)
        raise ValueError(f"the name {name!r:.100} occurs twice")
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def load_function(target: str) -> Callable[..., Any]:
    """Load the function named by ``path/to/file.py:function`` or ``package.module:function``.

    As with ``python -m``, modules may be in the current directory. A file may import modules from its own directory.

    Args:
        target: The file or module, and the name of a function or class in it.

    Raises:
        ValueError: If the target does not have this form, or the file, module or function does not exist.
    """
    path, _, name = target.rpartition(":")
    if path.endswith(".py"):
        module = _load_file(Path(path))
    elif all(part.isidentifier() for part in path.split(".")):
        module = _load_module(path)
    else:
        raise ValueError(
            f"{target!r} does not name a function: write path/to/file.py:function or package.module:function"
        )
    function: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{path} has no function {name!r}")
    return function


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"the script {path} does not exist")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, "importlib has a loader for every file whose name ends in .py"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Spawned worker processes look functions up by this name.
    sys.path.insert(0, str(path.resolve().parent))
    spec.loader.exec_module(module)
    return module


def _load_module(name: str) -> ModuleType:
    sys.path.insert(0, str(Path.cwd()))  # In a console script, sys.path lacks the current directory.
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # If the named module exists and imports a missing one, the original error is more helpful.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise ValueError(
            f"there is no module {error.name!r} in the current directory or in the Python environment"
        ) from error


def format_bytes(num_bytes: float) -> str:
    """Return a size as text.

    >>> format_bytes(1536)
    '1.5 KiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"


def format_number(value: float) -> str:
    """Return a number as text, with up to 12 digits.

    >>> format_number(12_500), format_number(0.05), format_number(0.001), format_number(2.5e-5)
    ('12,500', '0.05', '1e-3', '2.5e-5')
    """
    if 0 < abs(value) < 0.01:
        digits, _, exponent = f"{value:.11e}".partition("e")
        return f"{float(digits):.12g}e{int(exponent)}"
    return f"{value:,.12g}"


def count(num_things: int, noun: str, plural: str | None = None) -> str:
    """Return a count as text.

    >>> count(1, "shard"), count(2000, "batch", "batches")
    ('1 shard', '2,000 batches')
    """
    return f"{num_things:,} {noun if num_things == 1 else plural or noun + 's'}"
