"""Labels by the user's list of class names, instead of the list that a dataset was packed with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardio.classes import Classes, check_classes, number_classes
from shardio.decoding import FieldDecoder


def follow_classes(
    packed: Sequence[str], classes: Classes | None, decoder: FieldDecoder, where: str
) -> tuple[tuple[str, ...], FieldDecoder]:
    """Return a dataset's class names, by label, and a decoder that returns those labels. The stored data stays as is.

    Args:
        packed: The class names, by stored label.
        classes: The class names to follow instead, or None.
        decoder: The dataset's decoder.
        where: The dataset's source, for messages.

    Raises:
        TypeError: If ``classes`` is neither a list of names nor a dataset that has them.
        ValueError: If the dataset has no class names, or has a class that is not in ``classes``.
    """
    if classes is None:
        return tuple(packed), decoder
    names = check_classes(classes)
    if not packed:
        raise ValueError(
            f"{where} has no class names, so classes= cannot be applied: omit it, or pack the images "
            "from class folders (shardio pack IMAGES OUT)"
        )
    labels = tuple(number_classes(packed, names, where).values())
    return names, replace(decoder, labels=None if labels == tuple(range(len(labels))) else labels)
