"""From the bytes of samples' fields to values, a column of each field."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from shardio.decoding.arrays import decode_npy
from shardio.errors import SampleError
from shardio.images import (
    DEFAULT_MAX_PIXELS,
    CropPlan,
    DecodeError,
    DecoderName,
    Orientation,
    Pixels,
    decode_pil,
    open_image,
)
from shardio.interruptions import let_through
from shardio.order import Words
from shardio.reading import StoredSamples
from shardio.shards import IMAGE_FIELDS, LABEL_FIELD
from shardio.transforms import plan_images, refuse_pillow, render_images
from shardio.values import check_choice, check_flag, check_integer

Fields = str | Sequence[str]
Decode = Literal["array", "pil"]


def _decode_label(content: bytes) -> int:
    if not re.fullmatch(rb"-?[0-9]+", content.strip()):
        raise ValueError(f"a label is written in ASCII digits, got {content[:20]!r}")
    label = int(content)
    if not -(2**63) <= label < 2**63:
        raise ValueError(f"a label is an integer of 64 bits, got {content[:40]!r}")
    return label


DECODERS: dict[str, Callable[[bytes], Any]] = {
    LABEL_FIELD: _decode_label,
    "json": json.loads,
    "txt": bytes.decode,
    "npy": decode_npy,
}
"""How a field is decoded, by its name; a field that is not named here comes as bytes."""

TRUSTED_DECODERS: dict[str, Callable[[bytes], Any]] = {
    "npy": partial(decode_npy, trusted=True),
    "pkl": pickle.loads,
    "pickle": pickle.loads,
    "pyd": pickle.loads,
}
"""What is decoded otherwise when the caller says that the data may run code (WebDataset's names for pickles)."""


CHUNK, CHUNK_OF_WHOLE = 64, 16
"""Samples whose images are decoded together: fewer where whole images are held in memory before they are cropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldDecoder:
    """Turns stored samples into columns of values.

    Attributes:
        fields: Names of fields, for samples that are tuples of values, or one name, for bare values. ``image`` is the
            sample's image, whichever format it has, ``label`` its class, ``key`` its key.
        transform: Applied to the image, or None.
        decode: ``array`` gives transforms uint8 [height, width, 3] arrays, ``pil`` Pillow images.
        orientation: Whether the EXIF orientation turns the image.
        max_pixels: An image of more pixels is an error.
        trusted: Whether fields may be unpickled.
        labels: The label to give for each that is stored, or None to give those that are stored.
    """

    fields: Fields
    transform: Callable[[Any], Any] | None = None
    decode: Decode = "array"
    orientation: Orientation = "ignore"
    max_pixels: int = DEFAULT_MAX_PIXELS
    trusted: bool = False
    labels: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not self.names:
            raise ValueError("fields must name at least one field")
        check_choice("decode", self.decode, Decode)
        check_choice("orientation", self.orientation, Orientation)
        object.__setattr__(self, "max_pixels", check_integer("max_pixels", self.max_pixels, at_least=1))
        check_flag("trusted", self.trusted)
        if self.transform is not None and not callable(self.transform):
            raise TypeError(f"transform must be callable, got {type(self.transform).__name__}")
        if self.transform is not None and "image" not in self.names:
            raise ValueError(
                f"transform= is applied to the field 'image', and fields={self.fields!r} does not name it: add 'image' "
                "to fields, or leave transform out"
            )
        if self.decode == "pil":
            refuse_pillow(self.transform)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the values, in order."""
        return (self.fields,) if isinstance(self.fields, str) else tuple(self.fields)

    @property
    def chunk_size(self) -> int:
        """How many samples to decode together."""
        is_lean = self.decode == "array" and self.orientation == "ignore" and self.transform is not None
        return CHUNK if is_lean else CHUNK_OF_WHOLE

    @property
    def stored_fields(self) -> tuple[str, ...]:
        """The fields to read from storage, each once."""
        stored = {"image": IMAGE_FIELDS, "label": (LABEL_FIELD,), "key": ()}
        return tuple(dict.fromkeys(field for name in self.names for field in stored.get(name, (name,))))

    def check_fields(self, present: Sequence[str], where: str) -> None:
        """Raise ValueError if a dataset whose samples have the fields ``present`` cannot give what is asked for."""
        for name in self.names:
            choices = {"image": IMAGE_FIELDS, "label": (LABEL_FIELD,), "key": tuple(present)}.get(name, (name,))
            if not set(choices) & set(present):
                raise ValueError(
                    f"no sample of {where} has the field {name!r}: name some of key, "
                    f"{'image, ' if set(IMAGE_FIELDS) & set(present) else ''}{', '.join(present)} in fields=..."
                )

    def decode_columns(self, samples: StoredSamples, rng_keys: Words) -> list[list[Any]]:
        """Decode a chunk of samples.

        Args:
            samples: At most :attr:`chunk_size` samples with the stored fields.
            rng_keys: uint64 [n], one key for each sample's random transforms.

        Returns:
            A column of n values for each of :attr:`names`. Images are uint8 [height, width, 3], or what the
            transform gave.

        Raises:
            SampleError: If a field is missing or cannot be decoded.
        """
        return [
            self.render_images(samples, *self.plan_images(samples, rng_keys))[0]
            if name == "image"
            else self.decode_field(name, samples)
            for name in self.names
        ]

    def plan_images(self, samples: StoredSamples, rng_keys: Words) -> tuple[list[Any], CropPlan | None]:
        """Open the samples' images and draw their transforms' parameters; nothing is decoded that need not be.

        Returns:
            The images, and what is still to be done with them.

        Raises:
            SampleError: If an image is missing or damaged.
        """
        columns = [samples.columns[field] for field in IMAGE_FIELDS if field in samples.columns]
        images = []
        for row, contents in enumerate(zip(*columns, strict=True)):
            images.append(self._open_image(samples, row, contents))
        if self.transform is None and self.decode == "pil":
            return images, None
        try:
            return plan_images(self.transform, images, rng_keys)
        except DecodeError as error:
            raise _cannot_decode(samples, error.row, error) from error
        except StopIteration as error:  # It would end an epoch in silence.
            raise RuntimeError(f"the transform {self.transform!r} raised StopIteration") from error

    def render_images(
        self, samples: StoredSamples, images: list[Any], plans: CropPlan | None, rows: Pixels | None = None
    ) -> tuple[list[Any], list[DecoderName]]:
        """Carry out what :meth:`plan_images` left to be done.

        Args:
            samples: The samples, for messages.
            images: Of :meth:`plan_images`.
            plans: Likewise.
            rows: uint8 [n, height, width, 3] to write to, which must fit the plans; by default new arrays.

        Returns:
            The n images, and who decoded each of them, where something was left to be done.

        Raises:
            SampleError: If an image is damaged.
        """
        try:
            return render_images(images, plans, rows)
        except DecodeError as error:
            raise _cannot_decode(samples, error.row, error) from error

    def decode_field(self, name: str, samples: StoredSamples) -> list[Any]:
        """Return the values of a field that is no image.

        Raises:
            SampleError: If it is missing or cannot be decoded.
        """
        if name == "key":
            return samples.keys()
        field = LABEL_FIELD if name == "label" else name
        column = samples.columns[field]
        if None in column:
            _raise_missing(samples, column.index(None), field)
        decoder = (self.trusted and TRUSTED_DECODERS.get(field)) or DECODERS.get(field)
        if decoder is None:
            return list(column)
        if field == LABEL_FIELD and self.labels is not None:
            decoder = self._decode_renumbered
        values = list[Any]()
        try:
            values.extend(map(decoder, column))  # type: ignore[arg-type]  # there is no None in it
        except Exception as error:  # Each kind of field is wrong in ways of its own.
            let_through(error)
            row = len(values)
            key, where = samples.describe(row, (field,))
            if isinstance(error, MemoryError):  # It need not be the sample's fault.
                raise MemoryError(
                    f"memory ran out while field {field!r} of sample {key} in {where} was decoded"
                ) from error
            message = f"field {field!r} of sample {key} in {where} cannot be decoded: {str(error) or repr(error)}"
            raise SampleError(message, row=row, key=key, where=where) from error
        return values

    def _decode_renumbered(self, content: bytes) -> int:
        assert self.labels is not None, "the caller looked"
        label = _decode_label(content)
        if not 0 <= label < len(self.labels):
            raise ValueError(f"label {label} is outside of the dataset's {len(self.labels)} classes")
        return self.labels[label]

    def _open_image(self, samples: StoredSamples, row: int, contents: Sequence[bytes | None]) -> Any:
        """Return a picture that is not decoded yet, or a Pillow image, of the first content that is not empty."""
        content = next(filter(None, contents), None)
        if content is None and b"" in contents:
            raise _cannot_decode(samples, row, "it is empty, of 0 bytes")
        if content is None:
            key, where = samples.describe(row)
            message = f"sample {key} in {where} has no image (none of {', '.join(IMAGE_FIELDS)})"
            raise SampleError(message, row=row, key=key, where=where)
        read = decode_pil if self.decode == "pil" else open_image
        try:
            return read(content, orientation=self.orientation, max_pixels=self.max_pixels)
        except ValueError as error:
            let_through(error)
            raise _cannot_decode(samples, row, error) from error


def _cannot_decode(samples: StoredSamples, row: int, why: ValueError | str) -> SampleError:
    present = [field for field in IMAGE_FIELDS if field in samples.columns and samples.columns[field][row] is not None]
    decoded = [field for field in present if samples.columns[field][row]] or present
    key, where = samples.describe(row, decoded[:1])
    message = f"the image of sample {key} in {where} cannot be decoded: {str(why) or repr(why)}"
    return SampleError(message, row=row, key=key, where=where)


def _raise_missing(samples: StoredSamples, row: int, field: str) -> None:
    key, where = samples.describe(row)
    raise SampleError(
        f"sample {key} in {where} has no field {field!r}: name only fields that it has, as in fields=('image', 'key')",
        row=row,
        key=key,
        where=where,
    )
