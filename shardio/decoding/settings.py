"""The settings of a decoder of samples, checked, and what follows from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import Any, TypeVar

from shardio.decoding.field_names import check_present, stored_fields_of
from shardio.decoding.field_values import Missing, check_decoders
from shardio.decoding.planned_fields import LocatedValue, locate_values
from shardio.images import DEFAULT_MAX_PIXELS, Orientation
from shardio.transforms import (
    Combination,
    Compose,
    Decode,
    Mask,
    Transform,
    count_crops,
    field_kinds_of,
    is_builtin,
    is_made_for_pillow,
    others_in,
    refuse_pillow,
    replace_leading,
)
from shardio.values import check_choice, check_flag, check_integer

Joined = TypeVar("Joined")
Fields = str | Sequence[str]

CHUNK, CHUNK_OF_WHOLE = 64, 16
"""How many samples are decoded together: fewer if whole images are in memory before they are cropped."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FieldSettings:
    """The values of samples, and the settings by which they are decoded and transformed.

    Attributes:
        fields: The names of the values in a sample's tuple, or a single name for bare values. ``image`` is the
            sample's image in any format, ``label`` its class, ``key`` its key.
        transform: Applied to the image, or None.
        decode: ``array`` passes uint8 [height, width, 3] arrays to the transform, unless it is made for Pillow images;
            ``pil`` passes Pillow images.
        orientation: ``apply`` honours the EXIF orientation; ``ignore`` does not.
        max_pixels: The maximum number of pixels in an image; a larger image is an error.
        trusted: Whether fields may be unpickled, which can run code.
        labels: The label to return for each stored label, or None to return the stored labels.
        seed_transforms: Whether people's own callables draw from generators that each sample's rng key seeds.
        transform_sample: Applied to the dict of a sample's values, or None.
        decoders: The user's own decoders of fields, by name.
        missing: What a sample has that lacks a field other than the image: an ``error``, or the value None.
    """

    fields: Fields
    transform: Callable[[Any], Any] | None = None
    decode: Decode = "array"
    orientation: Orientation = "ignore"
    max_pixels: int = DEFAULT_MAX_PIXELS
    trusted: bool = False
    labels: tuple[int, ...] | None = None
    seed_transforms: bool = True
    transform_sample: Callable[[dict[str, Any]], Any] | None = None
    decoders: Mapping[str, Callable[[bytes], Any]] = field(default_factory=dict)
    missing: Missing = "error"

    def __post_init__(self) -> None:
        if not self.names:
            raise ValueError(f"fields must name at least one field, got {self.fields!r}")
        check_choice("decode", self.decode, Decode)
        check_choice("orientation", self.orientation, Orientation)
        object.__setattr__(self, "max_pixels", check_integer("max_pixels", self.max_pixels, at_least=1))
        check_flag("trusted", self.trusted)
        check_flag("seed_transforms", self.seed_transforms)
        for name in ("transform", "transform_sample"):
            if (given := getattr(self, name)) is not None and not callable(given):
                raise TypeError(f"{name} must be callable, got {type(given).__name__}")
        check_decoders(self.decoders, self.names)
        if self.missing not in ("error", None):
            raise ValueError(f"missing must be 'error' or None, got {self.missing!r}")
        if self.located_values and self.decode != "array":
            raise ValueError(f"a Compose with fields needs decode='array', the default, got decode={self.decode!r}")
        if "image" in self.names and "image" not in self.image_names:
            raise ValueError(
                f"fields={self.fields!r} names 'image', but those of the transform do not: add 'image': 'image' there"
            )
        if self.transform is not None and not self.image_names:
            raise ValueError(
                f"transform= is applied to the field 'image', but fields={self.fields!r} does not name it: add 'image' "
                "to fields, or remove transform"
            )
        if self.decode == "pil":
            refuse_pillow(self.transform)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the values, in order."""
        return (self.fields,) if isinstance(self.fields, str) else tuple(self.fields)

    @property
    def image_names(self) -> tuple[str, ...]:
        """The names of the values that are images for the transform: ``image``, or those of a Compose with fields."""
        alike = tuple(each.name for each in self.located_values if each.kind == "image")
        return alike or (("image",) if "image" in self.names else ())

    @property
    def located_values(self) -> list[LocatedValue]:
        """The values that a Compose with fields transforms."""
        return locate_values(field_kinds_of(self.transform), self.names, self.decoders)

    @property
    def followers(self) -> list[LocatedValue]:
        """Those of them that follow the images: masks, boxes, labels and points."""
        return [each for each in self.located_values if each.kind != "image"]

    @property
    def runs_user_code(self) -> bool:
        """Whether decoding runs code that is not shardio's: a transform, a decoder, or what pickles name."""
        return (
            self.trusted or bool(self.decoders) or self.transform_sample is not None or not is_builtin(self.transform)
        )

    @property
    def replacements(self) -> list[Any]:
        """The transforms of shardio's that replace what another library's pipeline begins with."""
        transform, _ = self.pipeline
        if transform is self.transform or not isinstance(transform, Compose):
            return []
        return list(takewhile(lambda step: isinstance(step, Transform | Combination), transform.transforms))

    @property
    def python_steps(self) -> list[Callable[..., Any]]:
        """The user's own callables that are called for each sample."""
        return [
            *others_in(self.pipeline[0]),
            *self.decoders.values(),
            *([] if self.transform_sample is None else [self.transform_sample]),
        ]

    @property
    def chunk_size(self) -> int:
        """How many samples to decode together."""
        has_masks = any(isinstance(each.kind, Mask) for each in self.located_values)  # They are decoded whole.
        is_lean = self.pipeline[1] == "array" and self.orientation == "ignore" and self.transform is not None
        return CHUNK if is_lean and not has_masks else CHUNK_OF_WHOLE

    @property
    def stored_fields(self) -> tuple[str, ...]:
        """The fields to read from storage, each once."""
        return tuple(dict.fromkeys(field for name in self.names for field in stored_fields_of(name)))

    def check_fields(self, present: Sequence[str], where: str) -> None:
        """Raise ValueError if a dataset whose samples have the fields ``present`` lacks a requested field."""
        check_present(self.names, present, where)

    @property
    def column_names(self) -> tuple[str, ...]:
        """The name of each column that is made: as in :attr:`names`, with a column for each crop of an image."""
        num_crops = count_crops(self.transform) or 1
        return tuple(column for name in self.names for column in [name] * (num_crops if name == "image" else 1))

    def join_crops(self, columns: Sequence[Joined], join: Callable[[list[Joined]], Joined]) -> list[Joined]:
        """Join the columns of a MultiCrop's crops.

        Args:
            columns: One for each of :attr:`column_names`.
            join: Makes one column of those of an image's crops.

        Returns:
            One column for each of :attr:`names`.
        """
        num_crops = count_crops(self.transform)
        if num_crops is None:
            return list(columns)
        left = iter(columns)
        return [join(list(islice(left, num_crops))) if name == "image" else next(left) for name in self.names]

    @property
    def pipeline(self) -> tuple[Callable[[Any], Any] | None, Decode]:
        """The transform, and what it takes: arrays, if what it begins with was recognised, or Pillow images.

        It is not kept, because people change the settings of their transforms between epochs.
        """
        decode = "pil" if is_made_for_pillow(self.transform) else self.decode
        found = replace_leading(self.transform, decode)
        return (self.transform, decode) if found is None else (found, "array")
