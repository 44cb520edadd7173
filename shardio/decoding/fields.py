"""Decode the bytes of samples' fields into columns of values, one for each field.

The images, masks, boxes and points of a chunk are planned together, then rendered.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice, takewhile
from typing import Any, TypeVar

from shardio.decoding.codecs import (
    Missing,
    call_decoder,
    check_decoders,
    check_present,
    choose_decoder,
    decode_values,
    open_images,
    stored_fields_of,
    undecodable,
)
from shardio.errors import SampleError, mark_sample
from shardio.images import (
    DEFAULT_MAX_PIXELS,
    JPEG_FIELDS,
    PIXEL_FIELDS,
    CropPlan,
    DecodedCache,
    DecodeError,
    DecoderName,
    Orientation,
    Picture,
    Pixels,
    PlannedCrop,
    PlanRow,
    RenderedImages,
    TiledChunk,
    collect_tiles,
    decode_pil,
    holds_images,
    open_image,
    render_crops,
)
from shardio.order import Words, derive_rng_key, make_rng_key
from shardio.process import no_end
from shardio.reading import StoredSamples
from shardio.shards import LABEL_FIELD
from shardio.transforms import (
    AnnotationError,
    Calls,
    Combination,
    Compose,
    Decode,
    FieldKind,
    Generators,
    Mask,
    Transform,
    call_with_sample,
    count_crops,
    field_kinds_of,
    is_builtin,
    is_made_for_pillow,
    is_planned,
    move_annotations,
    others_in,
    plan_crops,
    refuse_pillow,
    render_like,
    replace_leading,
)
from shardio.values import check_choice, check_flag, check_integer

Joined = TypeVar("Joined")
Fields = str | Sequence[str]
"""The names of the values in a sample's tuple, or a single name for bare values."""

CHUNK, CHUNK_OF_WHOLE = 128, 16
"""The numbers of samples to decode together: normally, and if whole images are in memory before they are cropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedImages:
    """Opened images and the drawn parameters of their transforms, from which :meth:`render` makes pixels.

    Attributes:
        name: The name of the images' field: ``image`` for images of any format.
        samples: The samples that contain the images, for error messages.
        calls: The object that calls user callables.
        crops: The n images for each crop of a MultiCrop, or for the only crop: either pictures and the plan that
            renders them, or finished images and None.
    """

    name: str = "image"
    samples: StoredSamples
    calls: Calls
    crops: Sequence[tuple[list[Any], CropPlan | None]]

    def fits(self, index: int, rows: Pixels | None) -> bool:
        """Return whether a crop of the images can be rendered into rows, uint8 [n, height, width, 3]."""
        plan = self.crops[index][1]
        return rows is not None and plan is not None and plan.fits(rows)

    def collect(self, memory: Pixels | None) -> tuple[TiledChunk, list[DecoderName]] | None:
        """Collect the tiles of the images; see :func:`shardio.images.collect_tiles`.

        Raises:
            SampleError: If an image that no device can decode is damaged.
        """
        crops = [PlannedCrop(images, plan) for images, plan in self.crops if plan is not None]
        assert len(crops) == len(self.crops), "can_tile is true"
        try:
            return collect_tiles(crops, memory)
        except DecodeError as error:
            raise undecodable(self.samples, self.name, error.row, error) from error

    def render(self, rows: Sequence[Pixels | None] | None = None) -> list[RenderedImages]:
        """Render the images.

        Args:
            rows: The destination of each crop's images, uint8 [n, height, width, 3], of the crop's output size; None
                for new arrays. By default, all crops are rendered into new arrays.

        Returns:
            The images of each crop, with the name of each image's decoder.

        Raises:
            SampleError: If an image is damaged.
        """
        planned = [index for index, (_, plan) in enumerate(self.crops) if plan is not None]
        rendered = [RenderedImages(images, []) for images, _ in self.crops]
        if rendered[0].images and self.crops[0][1] is None:
            rendered[0] = RenderedImages(rendered[0].images, self.calls.decoder_names[: len(rendered[0].images)])
        if planned:
            crops = [PlannedCrop(images, plan) for images, plan in self.crops if plan is not None]
            try:
                made = render_crops(crops, [None if rows is None else rows[index] for index in planned])
            except DecodeError as error:
                raise undecodable(self.samples, self.name, error.row, error) from error
            for index, images in zip(planned, made, strict=True):
                rendered[index] = images
        return rendered


@dataclass(frozen=True, slots=True, kw_only=True)
class LocatedValue:
    """A value of a sample that a transform changes.

    Attributes:
        reference: The reference in the transform, ``name`` or ``name.entry``.
        name: The name of one of the sample's values.
        entry: The key of an entry in the value ``name``, or None for the whole value.
        kind: The value's kind.
    """

    reference: str
    name: str
    entry: str | None
    kind: FieldKind


def locate_values(
    kinds: Mapping[str, FieldKind], names: Sequence[str], own_decoders: Collection[str]
) -> list[LocatedValue]:
    """Find the values of a sample that a transform changes.

    A reference is the name of a value, or the name, a dot, and the key of an entry in that value.

    Args:
        kinds: The kind of each value, by its reference.
        names: The names of a sample's values.
        own_decoders: The names of the values that user decoders return.

    Raises:
        ValueError: If a value does not exist, or shardio cannot decode an image.
    """
    located = []
    for reference, kind in kinds.items():
        parents = [name for name in names if reference.startswith(f"{name}.")]
        name = reference if reference in names else max(parents, key=len, default=None)
        if name is None:
            raise ValueError(
                f"the transform has the field {reference!r}, but fields={tuple(names)!r} does not name it: add it to "
                "the dataset's fields, or remove it from the transform's fields"
            )
        entry = None if name == reference else reference.removeprefix(f"{name}.")
        is_image = entry is None and holds_images(name) and name not in own_decoders
        if kind == "image" and not is_image:
            raise ValueError(
                f"the transform treats {reference!r} as an image, but it is neither 'image' nor an image field that "
                "shardio decodes"
            )
        if name in ("image", "label", "key") and kind != "image":
            raise ValueError(f"the transform treats {reference!r} as {kind!r}, but a dataset's {name!r} cannot be one")
        located.append(LocatedValue(reference=reference, name=name, entry=entry, kind=kind))
    return located


def check_sizes(samples: StoredSamples, pictures_by_name: Mapping[str, Sequence[Picture]]) -> None:
    """Raise SampleError if images of a sample differ in size."""
    (leader, pictures), *others = pictures_by_name.items()
    for name, follower in others:
        for row, (one, other) in enumerate(zip(pictures, follower, strict=True)):
            if one.size == other.size:
                continue
            key, where = samples.describe(row)
            shown = " and ".join(f"{width}×{height}" for height, width in (one.size, other.size))
            message = (
                f"the images {leader!r} and {name!r} of sample {key} in {where} have {shown} pixels: images that are "
                "transformed together must have the same size"
            )
            raise SampleError(message, row=row, key=key, where=where, stage="decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFields:
    """The opened and planned images of samples, and the values that must be transformed like them.

    Attributes:
        images: The images by field, all rendered according to the plan of the first field's images.
        followers: The values that are transformed like the images.
        sizes: The height and width of each sample's images.
        missing: The effect of a missing value: an error, or the value None.
    """

    images: Mapping[str, PlannedImages]
    followers: Sequence[LocatedValue] = ()
    sizes: Sequence[tuple[int, int]] = ()
    missing: Missing = "error"

    def move(self, columns: Mapping[str, Sequence[Any]], samples: StoredSamples) -> dict[str, list[Any]]:
        """Transform the followers like the images.

        Args:
            columns: The n values of every other field, by name.
            samples: The n samples.

        Returns:
            All columns, with the transformed values.

        Raises:
            SampleError: If a value is not valid for its kind.
        """
        moved = {name: list(column) for name, column in columns.items()}
        if not self.followers or not samples:
            return moved
        kinds = {each.reference: each.kind for each in self.followers}
        pictures, plan = next(iter(self.images.values())).crops[0]
        assert plan is not None, "all steps of a Compose with fields extend plans"
        for row in range(len(samples)):
            history = (*pictures[row].history, PlanRow(plan, row))
            try:
                values = {each.reference: self._get(each, columns[each.name][row]) for each in self.followers}
                values = move_annotations(kinds, values, self.sizes[row], history)
            except AnnotationError as error:
                raise self._describe(error, samples, row) from error
            for each in self.followers:
                column, value = moved[each.name], values[each.reference]
                if value is not None:
                    column[row] = value if each.entry is None else {**column[row], each.entry: value}
        return moved

    def _get(self, located: LocatedValue, value: Any) -> Any:
        if located.entry is None or (value is None and self.missing is None):
            return value
        if not isinstance(value, Mapping):
            raise AnnotationError(
                located.reference, f"must be an entry of {located.name!r}, got {type(value).__name__}"
            )
        if located.entry not in value and self.missing == "error":
            entries = ", ".join(map(repr, value))
            raise AnnotationError(
                located.reference, f"is missing: {located.name!r} has the entries {entries or 'none'}"
            )
        return value.get(located.entry)

    def _describe(self, error: AnnotationError, samples: StoredSamples, row: int) -> SampleError:
        name = next(each.name for each in self.followers if each.reference == error.name)
        key, where = samples.describe(row, (name,))
        message = f"field {error.name!r} of sample {key} in {where} {error}"
        return SampleError(message, row=row, key=key, where=where, stage="decode")


@dataclass(frozen=True, kw_only=True, eq=False)
class FieldDecoder:
    """A decoder that converts stored samples to columns of values.

    Attributes:
        fields: The names of the values in a sample's tuple, or a single name for bare values. ``image`` is the
            sample's image in any format, ``label`` is its class, and ``key`` is its key.
        transform: The transform of the image, or None.
        decode: ``array`` passes uint8 [height, width, 3] arrays to the transform, unless it is made for Pillow images;
            ``pil`` passes Pillow images.
        orientation: ``apply`` honors the EXIF orientation; ``ignore`` does not.
        max_pixels: The maximum number of pixels in an image; a larger image causes an error.
        trusted: Whether fields may be unpickled, which can run code.
        labels: The label to return for each stored label, or None to return the stored labels.
        seed_transforms: Whether each sample's rng key seeds the generators that user callables draw from.
        transform_sample: The transform of the dict of a sample's values, or None.
        decoders: User decoders of fields, by name.
        missing: The effect of a missing field other than the image: an ``error``, or the value None.
        decoded_cache: The cache of decoded JPEGs, or None.
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
    decoded_cache: DecodedCache | None = None

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
                f"fields={self.fields!r} names 'image', but the transform's fields do not: add 'image': 'image' there"
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
        """The names of the values that are images: ``image``, or the images in a Compose's fields."""
        located = tuple(each.name for each in self.located_values if each.kind == "image")
        return located or (("image",) if "image" in self.names else ())

    @cached_property
    def located_values(self) -> list[LocatedValue]:
        """The values that a Compose with fields changes."""
        return locate_values(field_kinds_of(self.transform), self.names, self.decoders)

    @property
    def followers(self) -> list[LocatedValue]:
        """The values that are transformed like the images: masks, boxes, labels and points."""
        return [each for each in self.located_values if each.kind != "image"]

    @property
    def runs_user_code(self) -> bool:
        """Whether decoding runs user code: a transform, a decoder, or code named in a pickle."""
        return (
            self.trusted or bool(self.decoders) or self.transform_sample is not None or not is_builtin(self.transform)
        )

    @property
    def replacements(self) -> list[Any]:
        """The built-in transforms that replace the leading steps of another library's pipeline."""
        transform, _ = self.pipeline
        if transform is self.transform or not isinstance(transform, Compose):
            return []
        return list(takewhile(lambda step: isinstance(step, Transform | Combination), transform.transforms))

    @property
    def python_steps(self) -> list[Callable[..., Any]]:
        """The user callables that decoding calls for each sample."""
        return [
            *others_in(self.pipeline[0]),
            *self.decoders.values(),
            *([] if self.transform_sample is None else [self.transform_sample]),
        ]

    @cached_property
    def chunk_size(self) -> int:
        """The number of samples to decode together."""
        has_masks = any(isinstance(each.kind, Mask) for each in self.located_values)  # Masks are decoded in full.
        is_lean = self.pipeline[1] == "array" and self.orientation == "ignore" and self.transform is not None
        return CHUNK if is_lean and not has_masks else CHUNK_OF_WHOLE

    @property
    def stored_fields(self) -> tuple[str, ...]:
        """The fields to read from storage, each once."""
        return tuple(dict.fromkeys(field for name in self.names for field in stored_fields_of(name)))

    @property
    def deferred_fields(self) -> frozenset[str]:
        """The stored fields that can be opened first and read later: uncompressed pixels, and JPEGs kept as pixels."""
        kinds = PIXEL_FIELDS if self.decoded_cache is None else (*PIXEL_FIELDS, *JPEG_FIELDS)
        others = {field for name in self.names if name not in self.image_names for field in stored_fields_of(name)}
        images = {field for name in self.image_names for field in stored_fields_of(name)}
        return frozenset(field for field in images - others if field.rpartition(".")[2] in kinds)

    def check_fields(self, present: Sequence[str], where: str) -> None:
        """Raise ValueError if a dataset whose samples have the fields ``present`` lacks a requested field."""
        check_present(self.names, present, where)

    @property
    def num_crops(self) -> int | None:
        """The number of crops of each image; None if the transform is not a MultiCrop."""
        return count_crops(self.transform)

    @property
    def column_names(self) -> tuple[str, ...]:
        """The name of each decoded column: :attr:`names`, with ``image`` repeated for each of its crops."""
        num_crops = self.num_crops or 1
        return tuple(column for name in self.names for column in [name] * (num_crops if name == "image" else 1))

    def join_crops(self, columns: Sequence[Joined], join: Callable[[list[Joined]], Joined]) -> list[Joined]:
        """Join the columns of the crops of each image.

        Args:
            columns: One column for each of :attr:`column_names`.
            join: A function that makes one column from the columns of an image's crops.

        Returns:
            One column for each of :attr:`names`.
        """
        if (num_crops := self.num_crops) is None:
            return list(columns)
        left = iter(columns)
        return [join(list(islice(left, num_crops))) if name == "image" else next(left) for name in self.names]

    @property
    def pipeline(self) -> tuple[Callable[[Any], Any] | None, Decode]:
        """The transform and its input: arrays, if shardio recognized the leading steps, or Pillow images.

        The transform and its input are determined again for each chunk, because users may change the settings of their
        transforms between epochs.
        """
        decode = "pil" if is_made_for_pillow(self.transform) else self.decode
        found = replace_leading(self.transform, decode)
        return (self.transform, decode) if found is None else (found, "array")

    def decode_columns(self, samples: StoredSamples, rng_keys: Words, calls: Calls) -> list[list[Any]]:
        """Decode a chunk of samples.

        Args:
            samples: At most :attr:`chunk_size` samples with the stored fields.
            rng_keys: uint64 [n], one rng key for each sample's random transforms.
            calls: The object that calls user code.

        Returns:
            A column of n values for each of :attr:`names`. Images are uint8 [height, width, 3], or the transform's
            results. For a MultiCrop, the images of a sample are a tuple.

        Raises:
            SampleError: If a field is missing or cannot be decoded.
        """
        planned = self.plan(samples, rng_keys, calls)
        others = self.decode_others(planned, samples, rng_keys, calls)
        columns, decoder_names = list[list[Any]](), list[DecoderName]()
        for name in self.names:
            if (images := planned.images.get(name)) is None:
                columns.append(others[name])
                continue
            rendered = images.render()
            decoder_names += rendered[0].decoder_names
            columns += [crop.images for crop in rendered]
        calls.decoder_names = decoder_names
        return self.join_crops(columns, lambda crops: list(zip(*crops, strict=True)))

    def plan(self, samples: StoredSamples, rng_keys: Words, calls: Calls) -> PlannedFields:
        """Open the samples' images and draw the transform's parameters.

        An image is decoded only if the transform needs its pixels.

        Raises:
            SampleError: If an image is missing or damaged, or images that are transformed together differ in size.
        """
        transform, form = self.pipeline
        options: dict[str, Any] = {"orientation": self.orientation, "max_pixels": self.max_pixels}
        if form == "pil":
            open_one: Callable[[bytes], Any] = partial(decode_pil, **options)
        else:
            open_one = partial(open_image, **options, cache=self.decoded_cache)
        opened = {name: open_images(samples, name, open_one) for name in self.image_names}
        if not opened:
            return PlannedFields(images={})
        check_sizes(samples, opened)
        (name, pictures), *further = opened.items()
        if form == "pil":
            calls.decoder_names = ["pillow"] * len(pictures)  # decode_pil has decoded the images.
        try:
            crops = plan_crops(transform, pictures, rng_keys, calls)
        except DecodeError as error:
            raise undecodable(samples, name, error.row, error) from error
        except StopIteration as error:  # A StopIteration would silently end an epoch.
            raise no_end(error) from error
        except Exception as error:
            self._mark(error, calls, samples)
            raise
        leader = PlannedImages(name=name, samples=samples, crops=crops, calls=calls)
        images = {name: leader}
        for other, others in further:  # Several images need a Compose that has fields and whose steps all extend plans.
            same, plan = leader.crops[0]
            try:
                images[other] = replace(leader, name=other, crops=[(render_like(others, same), plan)])
            except DecodeError as error:
                raise undecodable(samples, other, error.row, error) from error
        sizes = [picture.size for picture in pictures] if self.followers else []
        return PlannedFields(images=images, followers=self.followers, sizes=sizes, missing=self.missing)

    def make_calls(self) -> Calls:
        """Return an object that calls user code for a chunk and measures the time."""
        return Calls(self._generators)

    @cached_property
    def _generators(self) -> Generators | None:
        return Generators(self._callables) if self._callables and self.seed_transforms else None

    @property
    def _callables(self) -> list[Callable[..., Any]]:
        own = [] if is_builtin(self.transform) else [self.transform]
        return [each for each in (*own, self.transform_sample, *self.decoders.values()) if each is not None]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_generators"}

    @property
    def can_tile(self) -> bool:
        """Whether a device, instead of the workers, can decode the images."""
        transform, form = self.pipeline
        return bool(self.image_names) and form == "array" and is_planned(transform)

    def diverge(self) -> None:
        """Seed the generators of user callables differently in each process, unless they are seeded for each sample."""
        if not self.seed_transforms:
            Generators(self._callables).seed(int.from_bytes(os.urandom(8), "little"))

    def decode_others(
        self, planned: PlannedFields, samples: StoredSamples, keys: Words, calls: Calls, without: Container[str] = ()
    ) -> dict[str, list[Any]]:
        """Decode the fields other than the planned images, and transform the followers.

        Args:
            planned: The images.
            samples: n samples.
            keys: uint64 [n], the rng keys that seed the random generators of user decoders.
            calls: The object that calls user decoders.
            without: The names of additional fields not to decode.

        Returns:
            The n values of each field, by name.

        Raises:
            SampleError: If a field is missing, or cannot be decoded or transformed.
        """
        others = [name for name in self.names if name not in planned.images and name not in without]
        return planned.move({name: self._decode_field(name, samples, keys, calls) for name in others}, samples)

    def _decode_field(self, name: str, samples: StoredSamples, rng_keys: Words, calls: Calls) -> list[Any]:
        if name == "key":
            return samples.keys()
        if (own := self.decoders.get(name)) is not None:
            return call_decoder(own, samples, name, self.missing, calls, rng_keys)
        field = LABEL_FIELD if name == "label" else name
        return decode_values(samples, field, choose_decoder(field, self), self.missing)

    def transform_samples(
        self, columns: Sequence[Sequence[Any]], samples: StoredSamples, rng_keys: Words, calls: Calls
    ) -> list[Any]:
        """Apply ``transform_sample`` to samples, given their columns."""
        assert self.transform_sample is not None, "the caller checks this"
        dicts = [dict(zip(self.names, values, strict=True)) for values in zip(*columns, strict=True)]
        # transform_sample needs its own rng keys: the image's transform has already used the given keys.
        own_keys = derive_rng_key(rng_keys, make_rng_key(0, "sample"))
        try:
            return calls.call([partial(call_with_sample, self.transform_sample)], dicts, own_keys)
        except Exception as error:
            self._mark(error, calls, samples)
            raise

    def _mark(self, error: Exception, calls: Calls, samples: StoredSamples) -> None:
        if calls.failed_row is not None:
            during = "while transforming sample"
            mark_sample(error, "transform", calls.failed_row, *samples.describe(calls.failed_row), during)
