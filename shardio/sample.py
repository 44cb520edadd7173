"""Samples, and class names, whose indices are labels."""

from __future__ import annotations

import unicodedata
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from shardio.values import count

MAX_DEPTH = 16
"""The maximum number of nested wrappers to search. Some objects claim to have every attribute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One training example as stored.

    Attributes:
        key: The sample's identity.
        fields: The content of its fields by name (``jpg``, ``cls``), in the requested order.
        origin: The place where the sample is stored, for messages (``shard-000003.tar at byte 1536`` or a file's path).
    """

    key: str
    fields: Mapping[str, bytes]
    origin: str


class HasClasses(Protocol):
    """An object with class names: a shardio or torchvision dataset, or a manifest."""

    @property
    def classes(self) -> Sequence[str]: ...


Classes = Sequence[str] | HasClasses
"""Class names by label, or a dataset that has them."""


def check_classes(classes: Classes) -> tuple[str, ...]:
    """Return class names, by label.

    >>> check_classes(["cat", "dog"])
    ('cat', 'dog')

    Args:
        classes: A list of names, or a dataset (or a Subset of one, or a manifest) that has ``classes``.

    Raises:
        TypeError: If ``classes`` is neither a list of names nor a dataset with class names.
        ValueError: If ``classes`` is empty, repeats a name, or is a dataset whose parts number classes differently.
    """
    members = list(_members(classes))
    if any(list(member.classes) != list(members[0].classes) for member in members):
        raise ValueError("classes is a dataset whose parts number their classes differently: pass one of the parts")
    names = members[0].classes if members else getattr(classes, "classes", classes)
    if isinstance(names, str | bytes) or not isinstance(names, Sequence) or not all(isinstance(n, str) for n in names):
        raise TypeError(f"classes must be a list of names or a dataset with classes, got {classes!r:.100}")
    if not names:
        raise ValueError("classes is empty: pass at least one name or a dataset with class names")
    if repeated := [name for name, times in Counter(names).items() if times > 1]:
        raise ValueError(f"classes must not repeat a name, got {_shorten(repeated)} more than once")
    return tuple(names)


def number_classes(found: Sequence[str], classes: Sequence[str], where: str) -> dict[str, int]:
    """Return the label of each class that was found: its index in ``classes``.

    Raises:
        ValueError: If a class is not in ``classes``, or two classes look the same.
    """
    _refuse_twins(found, where)
    labels = {name: label for label, name in enumerate(classes)}
    if unknown := [name for name in found if name not in labels]:
        raise ValueError(
            f"{where} has classes that are not among the given ones ({_shorten(classes)}): {_shorten(unknown)}. Remove "
            "them from the data, or add them to the given classes"
        )
    return {name: labels[name] for name in found}


def _refuse_twins(names: Sequence[str], where: str) -> None:
    if all(map(str.isascii, names)):
        return
    seen = dict[str, str]()
    for name in names:
        if (other := seen.setdefault(unicodedata.normalize("NFC", name), name)) != name:
            raise ValueError(
                f"{where} has two classes that look the same, {other!a} and {name!a}: they differ only in how "
                "Unicode composes letters, as in copies from macOS. Give both the same name"
            )


def count_classes(dataset: Any) -> int | None:
    """Return the number of classes of a dataset or a loader; None if it has no class names."""
    return max((len(member.classes) for member in _members(dataset)), default=None)


def warn_of_other_classes(*datasets: Any, stacklevel: int = 3) -> None:
    """Warn if datasets that are used together give the same label to different classes.

    Args:
        datasets: Datasets or loaders. torch's Subsets and ConcatDatasets are searched.
        stacklevel: The caller that the warning names, as in ``warnings.warn``.
    """
    members = [member for dataset in datasets for member in _members(dataset)]
    for other in members[1:]:
        first = members[0]
        for label, (name, others_name) in enumerate(zip(first.classes, other.classes, strict=False)):
            if name != others_name:
                warnings.warn(
                    f"two datasets that are used together number their classes differently: label {label} is {name!r} "
                    f"in the {_describe(first)} and {others_name!r} in the {_describe(other)}. Create the second "
                    "dataset with classes=first_dataset",
                    UserWarning,
                    stacklevel=stacklevel,
                )
                return


def _members(dataset: Any, depth: int = 0) -> Iterator[Any]:
    if depth == MAX_DEPTH:
        return
    if isinstance(names := _find_names(dataset), list | tuple):
        if names and all(isinstance(name, str) for name in names):
            yield dataset
        return
    for inner in ("dataset", "loader"):
        if (wrapped := getattr(dataset, inner, None)) is not None:
            yield from _members(wrapped, depth + 1)
            return
    datasets = getattr(dataset, "datasets", None)  # The parts of a ConcatDataset or a MixedDataset.
    if isinstance(datasets, list | tuple) and type(dataset).__name__ != "StackDataset":  # Its labels are separate.
        for each in datasets:
            yield from _members(each, depth + 1)


def _find_names(dataset: Any) -> Any:
    try:
        return getattr(dataset, "classes", None)
    except Exception:  # A property may raise any error.
        return None


def _describe(dataset: Any) -> str:
    return f"{type(dataset).__name__} with {count(len(dataset.classes), 'class', 'classes')}"


def _shorten(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
