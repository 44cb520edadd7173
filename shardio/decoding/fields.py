"""Decoding of samples: from the bytes of their fields to one column of values for each field."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from shardio.decoding.codecs import choose_decoder
from shardio.decoding.field_values import call_decoder, decode_values
from shardio.decoding.planned_fields import PlannedFields, check_sizes, follow_images
from shardio.decoding.planned_images import PlannedImages, open_images, undecodable
from shardio.decoding.settings import FieldSettings
from shardio.errors import mark_sample
from shardio.images import DecodeError, DecoderName, decode_pil, open_image
from shardio.interruptions import no_end
from shardio.order import Words, derive_rng_key, make_rng_key
from shardio.reading import StoredSamples
from shardio.shards import LABEL_FIELD
from shardio.transforms import Calls, Generators, call_with_sample, is_builtin, plan_crops


@dataclass(frozen=True, kw_only=True, eq=False)
class FieldDecoder(FieldSettings):
    """A decoder from stored samples to columns of values."""

    def decode_columns(self, samples: StoredSamples, rng_keys: Words, calls: Calls) -> list[list[Any]]:
        """Decode a chunk of samples.

        Args:
            samples: At most :attr:`chunk_size` samples with the stored fields.
            rng_keys: uint64 [n], one rng key for each sample's random transforms.
            calls: Makes the calls of the user's own code.

        Returns:
            A column of n values for each of :attr:`names`. Images are uint8 [height, width, 3], or what the
            transform returned; tuples of these for a MultiCrop.

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

        No image is decoded here, unless the transform needs its pixels.

        Raises:
            SampleError: If an image is missing or damaged, or images that are transformed alike differ in size.
        """
        opened = {name: self._open_images(samples, name) for name in self.image_names}
        if not opened:
            return PlannedFields(images={})
        check_sizes(samples, opened)
        (name, pictures), *further = opened.items()
        leader = self._plan_images(samples, name, pictures, rng_keys, calls)
        images = {name: leader, **{other: follow_images(leader, other, followers) for other, followers in further}}
        others = self.followers
        sizes = [picture.size for picture in pictures] if others else []
        return PlannedFields(images=images, followers=others, sizes=sizes, missing=self.missing)

    def _open_images(self, samples: StoredSamples, name: str) -> list[Any]:
        open_one = decode_pil if self.pipeline[1] == "pil" else open_image
        return open_images(samples, name, partial(open_one, orientation=self.orientation, max_pixels=self.max_pixels))

    def _plan_images(
        self, samples: StoredSamples, name: str, images: list[Any], rng_keys: Words, calls: Calls
    ) -> PlannedImages:
        if self.pipeline[1] == "pil":
            calls.decoder_names = ["pillow"] * len(images)  # Opening them has decoded them.
        try:
            crops = plan_crops(self.pipeline[0], images, rng_keys, calls)
        except DecodeError as error:
            raise undecodable(samples, name, error.row, error) from error
        except StopIteration as error:  # It would silently end an epoch.
            raise no_end(error) from error
        except Exception as error:
            self._mark(error, calls, samples)
            raise
        return PlannedImages(name=name, samples=samples, crops=crops, calls=calls)

    def make_calls(self) -> Calls:
        """Return what makes and times the calls of the user's own code for a chunk."""
        return Calls(self._generators)

    @cached_property
    def _generators(self) -> Generators | None:
        return Generators(self._callables) if self._callables and self.seed_transforms else None

    @property
    def _callables(self) -> list[Callable[..., Any]]:
        """The user's own callables."""
        own = [] if is_builtin(self.transform) else [self.transform]
        return [each for each in (*own, self.transform_sample, *self.decoders.values()) if each is not None]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_generators"}

    def diverge(self) -> None:
        """If samples do not seed people's callables, let them draw other numbers than in other forked processes."""
        if not self.seed_transforms:
            Generators(self._callables).seed(int.from_bytes(os.urandom(8), "little"))

    def decode_others(
        self, planned: PlannedFields, samples: StoredSamples, rng_keys: Words, calls: Calls
    ) -> dict[str, list[Any]]:
        """Decode the fields other than the planned images, and transform those that follow them.

        Args:
            planned: The images.
            samples: n samples.
            rng_keys: uint64 [n], for the generators that the user's own decoders draw from.
            calls: Makes the calls of those decoders.

        Returns:
            The n values of each field, by name.

        Raises:
            SampleError: If a field is missing, or cannot be decoded or transformed.
        """
        others = [name for name in self.names if name not in planned.images]
        return planned.move({name: self._decode_field(name, samples, rng_keys, calls) for name in others}, samples)

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
        """Return what ``transform_sample`` makes of samples, given their columns."""
        assert self.transform_sample is not None, "the caller checks this"
        dicts = [dict(zip(self.names, values, strict=True)) for values in zip(*columns, strict=True)]
        # Other numbers than those that the image's transform has drawn.
        own_keys = derive_rng_key(rng_keys, make_rng_key(0, "sample"))
        try:
            return calls.call([partial(call_with_sample, self.transform_sample)], dicts, own_keys)
        except Exception as error:
            self._mark(error, calls, samples)
            raise

    def _mark(self, error: Exception, calls: Calls, samples: StoredSamples) -> None:
        """Add the sample to an error of the user's own code."""
        if calls.failed_row is not None:
            during = "while transforming sample"
            mark_sample(error, "transform", calls.failed_row, *samples.describe(calls.failed_row), during)
