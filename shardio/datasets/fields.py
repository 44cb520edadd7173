"""From the bytes of a sample's fields to the values that a dataset yields."""

from __future__ import annotations

import io
import json
import pickle
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from shardio.errors import SampleError
from shardio.images import DEFAULT_MAX_PIXELS, DecodeError, Orientation, check_orientation, decode_pil, open_image
from shardio.order import Words
from shardio.sample import Sample
from shardio.shards import IMAGE_FIELDS, LABEL_FIELD
from shardio.transforms import apply_transform, decode_pictures

Fields = str | Sequence[str]
Decode = Literal["array", "pil"]


def _decode_label(content: bytes) -> int:
    if not re.fullmatch(rb"-?[0-9]+", content.strip()):
        raise ValueError(f"a label is written in ASCII digits, got {content[:20]!r}")
    return int(content)


def _decode_npy(content: bytes) -> Any:
    return np.load(io.BytesIO(content), allow_pickle=False)


DECODERS: dict[str, Callable[[bytes], Any]] = {
    LABEL_FIELD: _decode_label,
    "json": json.loads,
    "txt": bytes.decode,
    "npy": _decode_npy,
}
"""How a field is decoded, by its name; a field that is not named here comes as bytes."""

TRUSTED_DECODERS: dict[str, Callable[[bytes], Any]] = {
    "npy": lambda content: np.load(io.BytesIO(content), allow_pickle=True),
    "pkl": pickle.loads,
    "pickle": pickle.loads,
    "pyd": pickle.loads,
}
"""What is decoded otherwise when the caller says that the data may run code (WebDataset's names for pickles)."""


CHUNK, CHUNK_OF_WHOLE = 64, 16
"""Samples whose images are decoded together: fewer where whole images are held in memory before they are cropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldDecoder:
    """Turns samples into what a dataset yields.

    Attributes:
        fields: Names of fields, for a tuple of values, or one name, for the bare value. ``image`` is the
            sample's image, whichever format it has, ``label`` its class, ``key`` its key.
        transform: Applied to the image, or None.
        decode: ``array`` gives transforms uint8 [height, width, 3] arrays, ``pil`` Pillow images.
        orientation: Whether the EXIF orientation turns the image.
        max_pixels: An image of more pixels is an error.
        trusted: Whether fields may be unpickled.
    """

    fields: Fields
    transform: Callable[[Any], Any] | None = None
    decode: Decode = "array"
    orientation: Orientation = "ignore"
    max_pixels: int = DEFAULT_MAX_PIXELS
    trusted: bool = False

    def __post_init__(self) -> None:
        if not self.names:
            raise ValueError("fields must name at least one field")
        if self.decode not in ("array", "pil"):
            raise ValueError(f"decode must be 'array' or 'pil', got {self.decode!r}")
        check_orientation(self.orientation)
        if self.max_pixels < 1:
            raise ValueError(f"max_pixels must be at least 1, got {self.max_pixels}")
        if self.transform is not None and not callable(self.transform):
            raise TypeError(f"transform must be callable, got {type(self.transform).__name__}")

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

    def decode_batch(self, samples: Sequence[Sample], keys: Words) -> list[Any]:
        """Decode some samples.

        Args:
            samples: n samples with the stored fields.
            keys: uint64 [n], one key for each sample's random transforms.

        Returns:
            What the dataset yields for each: a tuple of values, or the bare value.

        Raises:
            SampleError: If a field is missing or cannot be decoded.
        """
        values: list[Any] = []
        for start in range(0, len(samples), self.chunk_size):
            chunk = slice(start, start + self.chunk_size)
            columns = [self._decode_column(name, samples[chunk], keys[chunk]) for name in self.names]
            values += columns[0] if isinstance(self.fields, str) else zip(*columns, strict=True)
        return values

    def _decode_column(self, name: str, samples: Sequence[Sample], keys: Words) -> list[Any]:
        if name == "key":
            return [sample.key for sample in samples]
        if name != "image":
            return [self._decode_field(name, sample) for sample in samples]
        images = [self._open_image(sample) for sample in samples]
        try:
            if self.transform is not None:
                images = apply_transform(self.transform, images, keys)
            elif self.decode == "array":
                images = decode_pictures(images)
        except DecodeError as error:
            raise _cannot_decode(samples[error.number], error) from error
        return [_as_tensor(image) for image in images]

    def _open_image(self, sample: Sample) -> Any:
        """Return a picture that is not decoded yet, or a Pillow image."""
        name = next((field for field in IMAGE_FIELDS if field in sample.fields), None)
        if name is None:
            raise SampleError(
                f"sample {sample.key} in {sample.origin} has no image (none of {', '.join(IMAGE_FIELDS)})"
            )
        read = decode_pil if self.decode == "pil" else open_image
        try:
            return read(sample.fields[name], orientation=self.orientation, max_pixels=self.max_pixels)
        except ValueError as error:
            raise _cannot_decode(sample, error) from error

    def _decode_field(self, name: str, sample: Sample) -> Any:
        field = LABEL_FIELD if name == "label" else name
        content = sample.fields.get(field)
        if content is None:
            raise SampleError(
                f"sample {sample.key} in {sample.origin} has no field {field!r}: name only fields that it has, as in "
                f"fields=('image', 'key')"
            )
        decoder = (self.trusted and TRUSTED_DECODERS.get(field)) or DECODERS.get(field)
        if decoder is None:
            return content
        try:
            return decoder(content)
        except Exception as error:  # Each kind of field is wrong in ways of its own.
            where = f"field {field!r} of sample {sample.key} in {sample.origin}"
            raise SampleError(f"{where} cannot be decoded: {str(error) or repr(error)}") from error


def _cannot_decode(sample: Sample, error: ValueError) -> SampleError:
    return SampleError(
        f"the image of sample {sample.key} in {sample.origin} cannot be decoded: {str(error) or repr(error)}"
    )


def _as_tensor(image: Any) -> Any:
    """Return pixels as a uint8 tensor [3, height, width] that views the array, and anything else as it is."""
    if isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim == 3:
        return torch.from_numpy(image).permute(2, 0, 1)
    return image
