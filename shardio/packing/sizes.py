"""Sizes as users write them."""

from __future__ import annotations

from shardio.values import check_integer


def parse_size(name: str, size: str | int) -> int:
    """Return a number of bytes.

    >>> parse_size("max_shard_size", "256MiB")
    268435456

    Args:
        name: The name of the setting, for messages.
        size: The number, or a text such as ``256MiB`` or ``1GB``.

    Raises:
        TypeError: If the size is neither.
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
