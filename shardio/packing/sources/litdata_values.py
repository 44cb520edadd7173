"""The values of LitData's samples, as ``index.json`` describes them."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardio.errors import PackError
from shardio.json_text import parse_json
from shardio.packing.sources.file_series import INDEX

CONTENTS = dict.fromkeys(("bytes", "file", "image", "mesh", "pil"), "") | {
    "audio": "wav",
    "jpeg": "jpg",
    "nifti": "nii",
    "pdf": "pdf",
    "tiff": "tif",
    "tifffile": "tif",
    "video": "mp4",
}
"""The formats of contents, and the suffix of each if the format does not name one, as in ``image:png``."""

LISTS = ("jpeg_array",)
"""The formats of several images."""

ARRAYS = ("no_header_numpy", "no_header_tensor", "numpy", "tensor")
"""The formats of arrays."""

PLAIN = ("bool", "float", "int", "json", "str", "text")
"""The formats of values for the ``json`` field."""

_RUNNING_CODE = ("graph", "pickle")
"""The formats that LitData reads by unpickling them."""

_LABELS = ("label", "class", "y", "target")
_NODES = ("builtins.dict", "builtins.list", "builtins.tuple")


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """A value that each sample has.

    Attributes:
        keys: The keys and numbers that lead to it from the sample; none if it is the whole sample.
        format: Its format in ``index.json``.
    """

    keys: tuple[Hashable, ...]
    format: str

    @property
    def name(self) -> str:
        return ".".join(map(str, self.keys)) or "0"

    @property
    def kind(self) -> str:
        return self.format.partition(":")[0]

    @property
    def suffix(self) -> str:
        """The suffix of a content, "" if it is unknown."""
        return self.format.partition(":")[2].lower() or CONTENTS[self.kind]

    def get(self, sample: Any) -> Any:
        for key in self.keys:
            sample = sample[key]
        return sample


def find_leaves(src: Path, config: Mapping[str, Any]) -> tuple[Leaf, ...]:
    """Return the values of a sample."""
    if config.get("encryption"):
        raise PackError(f"{src} is encrypted: decrypt the samples with LitData, and pack an iterable of them")
    if config.get("item_loader") not in (None, "PyTreeLoader") or not config["data_spec"]:
        raise PackError(
            f"{src} was written for LitData's {config.get('item_loader')}: only samples of the default PyTreeLoader "
            "can be packed. Read the others with LitData, and pack an iterable of them"
        )
    keys = list(_find_keys(src, parse_json(config["data_spec"])[1], ()))
    leaves = tuple(Leaf(keys=each, format=name) for each, name in zip(keys, config["data_format"], strict=False))
    if not len(keys) == len(config["data_format"]) == len({leaf.name for leaf in leaves}):
        raise PackError(f"{src / INDEX} is invalid: data_format does not match data_spec. Create it again")
    for leaf in leaves:
        if leaf.kind in _RUNNING_CODE:
            raise PackError(
                f"the value {leaf.name!r} of each sample of {src} has the format {leaf.format!r}: it is a pickle, "
                "which can run any code when it is read. If you trust it, read the samples with LitData, and pack an "
                "iterable of them"
            )
        if leaf.kind not in (*CONTENTS, *LISTS, *ARRAYS, *PLAIN):
            raise PackError(
                f"the value {leaf.name!r} of each sample of {src} has the format {leaf.format!r}, which is unknown "
                "here: read the samples with LitData, and pack an iterable of them"
            )
    return leaves


def _find_keys(src: Path, spec: Mapping[str, Any], keys: tuple[Hashable, ...]) -> Iterator[tuple[Hashable, ...]]:
    """Yield the keys of each value in a specification of LitData (``TreeSpec``)."""
    if spec["type"] is None:
        yield keys
        return
    if spec["type"] not in _NODES:  # LitData imports a module that the specification of some types names.
        raise PackError(
            f"samples of {src} contain a {spec['type']}: only dictionaries, lists and tuples can be packed. Read the "
            "samples with LitData, and pack an iterable of them"
        )
    children = spec["children_spec"]
    names = parse_json(spec["context"]) if spec["type"] == "builtins.dict" else range(len(children))
    for name, child in zip(names, children, strict=True):
        yield from _find_keys(src, child, (*keys, name))


def find_labels(leaves: Sequence[Leaf]) -> list[str]:
    """Return the names of labels: an integer or text with a usual name, or the second value in (image, label)."""
    found = [leaf.name for leaf in leaves if leaf.name in _LABELS and leaf.kind in PLAIN]
    if [leaf.keys for leaf in leaves] == [(0,), (1,)] and leaves[0].kind in CONTENTS and leaves[1].kind == "int":
        found = [leaves[1].name]
    return sorted(found, key=_LABELS.index)[:1] if len(found) > 1 else found


def find_paths(leaves: Iterable[Leaf]) -> set[tuple[Hashable, ...]]:
    """Return the keys of values, and those of the dictionaries and lists that hold them."""
    return {leaf.keys[:length] for leaf in leaves for length in range(1, len(leaf.keys) + 1)}


def leave_out(value: Any, keys: tuple[Hashable, ...], left_out: Collection[tuple[Hashable, ...]]) -> Any:
    """Return a value without those at some keys."""
    if isinstance(value, dict):
        return {
            key: leave_out(each, (*keys, key), left_out) for key, each in value.items() if (*keys, key) not in left_out
        }
    if isinstance(value, list | tuple):
        return [leave_out(each, (*keys, i), left_out) for i, each in enumerate(value) if (*keys, i) not in left_out]
    return value
