"""Check keys and field names before they are written."""

from __future__ import annotations

from unicodedata import category

from shardio.shards import join_name, split_name


def check_name(key: object, field: object) -> tuple[str, str]:
    """Return a key and a field name if every reader of the tar finds them again.

    Raises:
        TypeError: If one of them is not a string.
        ValueError: If readers would cut the member's name differently, or the key is not a relative path. The message
            says how to change it.
    """
    key = check_key(key)
    return key, check_field(key, field)


def check_field(key: str, field: object) -> str:
    """Return a field name if readers find it and the key again.

    Args:
        key: The key of the sample, which other tools may have made.
        field: The name.

    Raises:
        TypeError: If it is not a string.
        ValueError: If it cannot be a field name.
    """
    if not isinstance(field, str):
        raise TypeError(f"the field names of sample {key!r} must be strings such as 'jpg', got {field!r}")
    if not field or "/" in field or not _is_printable(field):
        raise ValueError(
            f"the field name {field!r} of sample {key!r} is empty, or contains a slash, a control character or a "
            "surrogate: use a file suffix such as 'jpg' or 'seg.png'"
        )
    if field != field.lower():
        raise ValueError(
            f"the field name {field!r} of sample {key!r} contains capital letters, which readers convert to lower "
            f"case: use {field.lower()!r}"
        )
    if split_name(join_name(key, field)) != (key, field):
        raise ValueError(f"field {field!r} of sample {key!r} would be read as {split_name(join_name(key, field))}")
    return field


def check_key(key: object) -> str:
    """Return a key if it can be one.

    Raises:
        TypeError: If it is not a string.
        ValueError: If it cannot be a key.
    """
    if not isinstance(key, str):
        raise TypeError(f"__key__ must be a string such as 'cats/0001', got {key!r}")
    folder, _, base = key.rpartition("/")
    if not base:
        raise ValueError(f"the key {key!r} is empty or ends in a slash: use a name such as 'cats/0001'")
    if "." in base:
        raise ValueError(
            f"the key {key!r} has a dot after its last slash, but a key ends there at the first dot, so the rest would "
            f"be read as part of the field's name: use {folder + '/' * bool(folder) + base.replace('.', '_')!r}"
        )
    if not _is_printable(key):
        raise ValueError(f"the key {key!r} contains a control character or a surrogate: remove it")
    if key.startswith("/") or {"", ".", ".."} & set(key.split("/")):
        raise ValueError(f"the key {key!r} is not a plain relative path: use a key such as 'cats/0001'")
    if split_name(join_name(key, "x")) is None:
        raise ValueError(f"the key {key!r} starts with a name such as __meta__, which readers skip: use another name")
    return key


def _is_printable(text: str) -> bool:
    return (text.isascii() and text.isprintable()) or not any(category(letter) in ("Cc", "Cs") for letter in text)
