"""MixedDataset: the samples of several datasets, mixed in given proportions."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import IterableDataset

from shardio.bad_samples import read_samples
from shardio.datasets.map_datasets import MapDataset, ShardMapDataset, takes_rng_keys
from shardio.datasets.ordered import EpochSampler, ShardDataset, own_chunks, warn_of_other_length
from shardio.datasets.ranked import Iterated, Ordered, RankSettings, SampleIterator
from shardio.datasets.samples import add_value, check_integers, known_epoch, mark_valid, takes
from shardio.datasets.wrappers import JoinedDataset, Unwrapped, unwrap, why_not_concatenated
from shardio.errors import SampleError, place_mark
from shardio.order import (
    Cursor,
    MixedOrder,
    MixedSplit,
    OrderSettings,
    Remainder,
    SourceOrder,
    Split,
    Stop,
    Weights,
    Words,
    augment_rng_keys,
    decode_picks,
    derive_rng_key,
    make_mixed_order,
    make_rng_key,
    weigh_by_size,
)
from shardio.reading import (
    SOURCE_FIELD,
    JoinedReader,
    Reader,
    RemoteParts,
    RemoteSamples,
    SampleReader,
    SourceReader,
    find_remote_shards,
)
from shardio.shards import ShardTable, join_tables
from shardio.values import check_choice, check_flag, check_integer, check_optional_integer, count

Batches = Literal["mixed", "pure"]
"""The composition of a batch: samples from all sources, or from a single source."""

SAMPLES_AT_ONCE = 64
"""The number of samples that an iteration reads together."""


@dataclass(frozen=True, kw_only=True)
class MixedSettings(RankSettings):
    """The arguments of MixedDataset.

    Attributes:
        sources: A dict of sources by name. A source is a pair of a dataset and its weight or, with ``weights``, only
            a dataset. Datasets are ShardDatasets, map-style datasets, or EpochSamplers, which set the order of a
            map-style dataset.
        weights: ``proportional`` derives the weights from the sources' sizes: size * repeat, to the power of
            ``temperature``.
        temperature: The exponent of proportional weights. With 1, sources are picked in proportion to their sizes; with
            0, equally often.
        repeat: By source name, the number of times that a source is delivered before it is exhausted; 1 by default.
        stop: When an epoch ends. ``first`` ends the epoch when a source is exhausted, so epoch 0 delivers no sample
            more than ``repeat`` times. ``longest`` ends the epoch when every sample has been delivered, and repeats
            the other sources. With ``all-once``, a source leaves the mixture when it is exhausted, and the epoch ends
            when the last source leaves. An integer is the number of samples in an epoch.
        batches: ``mixed`` mixes the sources in each batch. With ``pure``, all ranks' batches of a step come from one
            source, so sources may differ in the shapes of their samples.
        global_batch_size: The total size of all ranks' batches in a step. ``batches="pure"`` and :meth:`at` require it.
        source_field: Whether to add the source's number as the last value of a tuple, or as the key ``source`` of a
            dict.
        shuffle: Whether to vary the order of the sources at random, as far as their proportions allow, and to shuffle
            datasets other than ShardDatasets and EpochSamplers, which keep their own order.
        seed: The seed of the schedule, of the transforms, and of the order of datasets that have no order of their own.
        remainder: The treatment of the last samples if they do not fill a batch on every rank: see
            :class:`shardio.ShardDataset`.
        batch_size: The batch size of torch's DataLoader; set it to get the same batches as from shardio.DataLoader,
            which uses its own batch size.
    """

    sources: Mapping[str, Any] = field(kw_only=False)
    weights: Literal["proportional"] | None = None
    temperature: float = 1.0
    repeat: Mapping[str, int] | None = None
    stop: Stop | int = "first"
    batches: Batches = "mixed"
    global_batch_size: int | None = None
    source_field: bool = False
    shuffle: bool = True
    seed: int = 0
    remainder: Remainder = "pad"
    batch_size: int | None = None


class MixedDataset(Ordered, Iterated):
    """An iterable-style dataset that mixes several datasets in given proportions.

    After any number n of samples, a source with the share w has been picked floor(n * w) or ceil(n * w) times. Each
    source is read in its own order, epoch after epoch, so it repeats a sample only after all other samples from that
    source have been delivered. The schedule is a pure function of the sources, the weights and the seed. The schedule
    does not depend on the number of ranks and workers, so a state fits any number of either.

    >>> mix = MixedDataset({"web": (web, 0.7), "code": (code, 0.3)})  # doctest: +SKIP
    >>> loader = DataLoader(mix, batch_size=128, num_workers=2)  # doctest: +SKIP

    ``mix[n]`` is the sample at position n of the schedule, counted over all ranks. To get an epoch as a map-style
    dataset, use torch's ``Subset(mix, range(mix.num_all_samples))``.

    Attributes:
        names: The names of the sources, by number.

    Raises:
        ValueError: If an argument is out of range, a weight is missing, or an epoch would have no end.
        TypeError: If a source is not a dataset that can be mixed.
    """

    @takes(MixedSettings)
    def __init__(self, options: MixedSettings) -> None:
        Ordered.__init__(self, options)  # type: ignore[arg-type]  # It needs only fields that both kinds have.
        Iterated.__init__(self)
        if type(self).__iter__ is not MixedDataset.__iter__:
            raise TypeError(
                f"{type(self).__name__} must not override __iter__, because loaders read the sources of a mixture "
                "themselves: use the sources' transform= or transform_sample="
            )
        self._options = replace(
            options,
            batches=check_choice("batches", options.batches, Batches),
            global_batch_size=check_optional_integer("global_batch_size", options.global_batch_size, at_least=1),
            source_field=check_flag("source_field", options.source_field),
            stop=check_choice("stop", options.stop, Stop)
            if isinstance(options.stop, str)
            else check_integer("stop", options.stop, at_least=1),
        )
        self.settings = OrderSettings(
            shuffle=check_flag("shuffle", options.shuffle),
            seed=check_integer("seed", options.seed, at_least=0, below=2**63),
            window=1,
            strata=1,
        )
        if not isinstance(options.sources, Mapping):
            raise TypeError(f"sources must be a dict of the sources by name, got {type(options.sources).__name__}")
        sources, given = list[Source](), dict[str, float]()
        for name, source in options.sources.items():
            dataset = source
            if isinstance(source, tuple):
                dataset, weight = _split_pair(name, source)
                given[name] = _check_number(f"the weight of the source {name!r}", weight)
            sources.append(self._open_source(name, dataset))
        self._weights = self._find_weights(sources, given)
        self._joined: tuple[list[Any], MixedSamples] | None = None
        self._set_order(sources, [])

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(source.order.name for source in self._sources)

    @property
    def datasets(self) -> list[Any]:
        """The datasets of the sources, by number."""
        return [source.part.datasets[0] for source in self._sources]

    @property
    def num_all_samples(self) -> int:  # type: ignore[override]  # an attribute of other orders
        """The number of samples in an epoch of the mixture, over all ranks."""
        return self.order.num_samples

    @property
    def digest(self) -> str:  # type: ignore[override]
        """An empty string, because a state itself describes the sources."""
        return ""

    @property
    def joined(self) -> MixedSamples:
        """The samples of all sources, which loaders read by the indices that :meth:`MixedOrder.samples_at` returns."""
        for source in self._sources:
            if isinstance(source.given, ShardDataset):
                source.part.dataset.follow(source.given)
        parts = [source.part for source in self._sources]
        decoders = [getattr(part.dataset, "decoder", None) for part in parts]
        is_current = self._joined is not None and self._joined[1].datasets[0] is self  # A copy needs its own samples.
        if self._joined is None or not is_current or any(map(operator.is_not, decoders, self._joined[0])):
            joined = MixedSamples(self, self.order, parts, has_source=self._options.source_field)
            self._joined = decoders, joined
        return self._joined[1]

    def at(self, step: int, weights: Mapping[str, Any]) -> MixedDataset:
        """Change the weights from a given step onward; return this dataset.

        Call this before iterating. A source that is not in ``weights`` is no longer picked. A pair of a dataset and a
        weight adds a source, which must have a new name.

        Args:
            step: The number of earlier steps, counted over all epochs. A step is one batch on every rank.
            weights: The weight of each source by name.

        Raises:
            ValueError: If ``global_batch_size`` is not set, the steps are not ascending, a source is unknown, or
                ``stop`` is ``all-once``.
        """
        step = check_integer("step", step, at_least=1)
        if self._changes and step <= self._changes[-1][0]:
            raise ValueError(f"at({step}) comes after at({self._changes[-1][0]}): call at() in the order of the steps")
        added, numbers = list[Source](), dict[str, float]()
        for name, weight in weights.items():
            if isinstance(weight, tuple):
                if name in self.names:
                    raise ValueError(f"the mixture already has a source {name!r}: pass its weight alone")
                dataset, weight = _split_pair(name, weight)
                added.append(self._open_source(name, dataset))
            elif name not in self.names:
                raise ValueError(
                    f"the mixture has no source {name!r}, only {', '.join(self.names)}: to add one, pass a pair of a "
                    "dataset and its weight"
                )
            numbers[name] = _check_number(f"the weight of the source {name!r}", weight)
        # Nothing changes unless the new order is valid.
        self._set_order([*self._sources, *added], [*self._changes, (step, numbers)])
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_joined": None}

    def read_cursor(self, state: Any) -> Cursor:
        return self.order.read(state)

    def dump_cursor(self, cursor: Cursor) -> dict[str, Any]:
        return self.order.dump(cursor)

    def split(self, cursor: Cursor, *, batch_size: int, remainder: Remainder) -> Split:
        share = super().split(cursor, batch_size=batch_size, remainder=remainder)
        size = self._options.global_batch_size
        if size is not None and size != batch_size * share.world_size:
            quotient, rest = divmod(size, share.world_size)
            remedy = f"set the batch size to {quotient}" if not rest else "use a number of ranks that divides it"
            raise ValueError(
                f"the mixture has global_batch_size={size}, but {count(share.world_size, 'rank')} with batches of "
                f"{batch_size} samples have {batch_size * share.world_size}: {remedy}"
            )
        values = {name: getattr(share, name) for name in Split.__slots__}
        return MixedSplit(**values, order=self.order, epoch=cursor.epoch)

    def find_order(self, epoch: int) -> Callable[[NDArray[np.int64]], NDArray[np.int64]]:
        order = self.order
        return lambda picks: order.find_samples(*decode_picks(picks))

    def find_windows(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.zeros_like(positions)  # The windows of the sources end at different times.

    @property
    def window(self) -> int:
        # The shortest part of the mixture in which one of the sources delivers a whole window.
        weights, total = self.order.weights_at(0), sum(self.order.weights_at(0))
        windows = [
            each.order.settings.window * total // weight
            for each, weight in zip(self._sources, weights, strict=True)
            if each.order.settings.shuffle and weight
        ]
        return min([*windows, self.num_all_samples])

    def __len__(self) -> int:
        """Return the number of samples that this rank yields in a full epoch."""
        share = super().split(Cursor(epoch=0), batch_size=self.batch_size or 1, remainder=self.remainder)
        warn_of_other_length(self, share)
        return share.num_own_samples

    def __getitem__(self, position: int) -> Any:
        """Return the sample at a position (at least 0) of the schedule, which continues after an epoch."""
        return self.__getitems__([position])[0]

    def __getitems__(self, positions: Any) -> list[Any]:
        """Return the samples at positions of the schedule. torch's Subset calls this method."""
        checked = check_integers(positions)
        if (checked < 0).any():
            raise IndexError(f"a position of a mixture must be at least 0, got {checked.min()}")
        epochs, own = np.divmod(checked.astype(np.int64), self.num_all_samples)
        samples = [self.order.samples_at(epoch, own[row : row + 1]) for row, epoch in enumerate(epochs.tolist())]
        indices = np.concatenate(samples) if samples else np.array([], np.int64)
        joined = self.joined
        keys = [joined.rng_keys(self.seed, epoch, index) for epoch, index in zip(epochs.tolist(), samples, strict=True)]
        return joined.read(indices, np.concatenate(keys)) if keys else []

    def __iter__(self) -> Iterator[Any]:
        """Iterate over this worker's samples in this rank's share of the epoch.

        Raises:
            RuntimeError: If a framework splits the samples over ranks a second time.
        """
        return SampleIterator(self, self._cell.start(self), self._iterate)

    def _iterate(self, cursor: Cursor, split: Split, num_left_out: int) -> Iterator[Any]:
        samples = self.joined
        chunks = own_chunks(self, samples, cursor, split, num_left_out, SAMPLES_AT_ONCE)
        with closing(samples), closing(chunks):
            for indices, valid in chunks:
                values = samples.read(indices, samples.rng_keys(self.seed, cursor.epoch, indices))
                yield from values if valid is None else map(mark_valid, values, valid.tolist())

    def _open_source(self, name: str, given: Any) -> Source:
        if not isinstance(name, str):
            raise TypeError(f"the name of a source must be a string, got {name!r}")
        repeat = check_integer(f"repeat[{name!r}]", (self._options.repeat or {}).get(name, 1), at_least=1)
        ordered: Ordered = given if isinstance(given, ShardDataset | EpochSampler) else self._sample(name, given)
        kind, base = type(ordered), ShardDataset if isinstance(ordered, ShardDataset) else EpochSampler
        if getattr(kind, "__iter__") is not base.__iter__:  # noqa: B009  # Ordered itself has none.
            raise TypeError(
                f"the source {name!r} is a {kind.__name__}, which overrides __iter__: a mixture does not call it. Use "
                f"{base.__name__} itself, with the dataset's transform= or transform_sample="
            )
        if isinstance(ordered, ShardDataset):
            part = Unwrapped(dataset=ordered.as_map_dataset(), subsets=())
        else:
            part = unwrap(ordered.dataset)  # type: ignore[attr-defined]  # an EpochSampler
        order = SourceOrder(
            name=name, shard_sizes=ordered.shard_sizes, settings=ordered.settings, digest=ordered.digest, repeat=repeat
        )
        return Source(given=given, part=part, order=order)

    def _sample(self, name: str, dataset: Any) -> EpochSampler:
        is_map_style = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        if isinstance(dataset, IterableDataset) or not is_map_style:
            raise TypeError(
                f"the source {name!r} is a {type(dataset).__name__}, which cannot be mixed: use a ShardDataset, a "
                "map-style dataset (with __len__ and __getitem__), or an EpochSampler over one"
            )
        return EpochSampler(dataset, shuffle=self.settings.shuffle, seed=self.settings.seed, rank=0, world_size=1)

    def _find_weights(self, sources: Sequence[Source], given: Weights) -> Weights:
        options, names = self._options, [source.order.name for source in sources]
        if not sources:
            raise ValueError("a mixture needs at least one source")
        if unknown := set(options.repeat or {}) - set(names):
            raise ValueError(f"repeat has keys that are not sources: {', '.join(sorted(unknown))}")
        temperature = _check_number("temperature", options.temperature)
        if options.weights is None:
            if missing := [name for name in names if name not in given]:
                raise ValueError(
                    f"the source {missing[0]!r} has no weight: pass a pair of the dataset and its weight, or set "
                    "weights='proportional'"
                )
            if temperature != 1:
                raise ValueError(f"temperature={temperature} has no effect without weights='proportional': remove it")
            return given
        if isinstance(options.weights, Mapping):
            raise TypeError("weights must be 'proportional' or None: pass each weight in sources, with its dataset")
        check_choice("weights", options.weights, Literal["proportional"])
        if given:
            name = next(iter(given))
            raise ValueError(f"weights={options.weights!r} and the weight of {name!r} contradict each other")
        return weigh_by_size([source.order for source in sources], temperature)

    def _set_order(self, sources: list[Source], changes: list[tuple[int, Weights]]) -> None:
        options = self._options
        self.order = make_mixed_order(
            [source.order for source in sources],
            self._weights,
            changes,
            stop=options.stop,
            is_pure=options.batches == "pure",
            global_batch_size=options.global_batch_size,
            seed=self.settings.seed if self.settings.shuffle else None,
        )
        self._sources, self._changes, self._joined = sources, changes, None


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A source of a mixture: the dataset or sampler that the user gave, its samples, and their order."""

    given: Any
    part: Unwrapped
    order: SourceOrder


def _split_pair(name: str, pair: tuple[Any, ...]) -> tuple[Any, Any]:
    if len(pair) != 2:
        raise ValueError(
            f"the source {name!r} must be a pair of a dataset and its weight, got {count(len(pair), 'value')}"
        )
    return pair


def _check_number(name: str, value: Any) -> float:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not 0 <= value < float("inf"):  # type: ignore[operator]  # Numbers can be compared.
        raise ValueError(f"{name} must be at least 0 and finite, got {value!r}")
    return value  # type: ignore[return-value]  # Integers and Fractions stay exact.


def _join_tables(datasets: Sequence[ShardMapDataset]) -> ShardTable | None:
    # One reader of all shards is faster than one for each dataset, but needs equal settings and one kind of store.
    if len({(dataset.table.is_local, dataset.verify) for dataset in datasets}) > 1:
        return None
    return join_tables([dataset.table for dataset in datasets])


class MixedSamples(JoinedDataset):
    """The samples of a mixture's sources, at the indices that :meth:`MixedOrder.samples_at` returns.

    Attributes:
        obstacle: The reason why the sources' own methods must read the samples; None if shardio's own code can read
            them.
    """

    def __init__(self, mix: MixedDataset, order: MixedOrder, parts: Sequence[Unwrapped], *, has_source: bool) -> None:
        inner = [part.dataset for part in parts]
        self.obstacle = why_not_concatenated(parts, "source")
        if self.obstacle is None and has_source and inner[0].decoder.transform_sample is not None:
            self.obstacle = "source_field=True adds a value to the result of transform_sample"
        decoder, self._table = None, None
        reader: Reader = JoinedReader([])
        if self.obstacle is None:
            decoder, reader = inner[0].decoder, JoinedReader([each.reader for each in inner])
            if all(not part.subsets and type(part.dataset) is ShardMapDataset for part in parts):
                self._table = _join_tables(inner)
            if self._table is not None:
                reader = SampleReader(self._table, inner[0].verify)
            if has_source:
                decoder = replace(decoder, fields=(*decoder.names, SOURCE_FIELD))
                reader = SourceReader(reader, order.starts)
        super().__init__(parts, decoder, reader)  # type: ignore[arg-type]  # Without a decoder, nothing uses it.
        self._mix: Callable[[], MixedDataset | None] = weakref.ref(mix)  # A reference cycle would keep files open.
        self._order, self._has_source, self._seed = order, has_source, mix.seed

    @property
    def datasets(self) -> tuple[Any, ...]:
        return (self._mix(), *(dataset for part in self._parts for dataset in part.datasets))

    def divide(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return self._order.split_index(indices)

    def locate(self, indices: NDArray[np.int64]) -> Any:
        return super().locate(indices) if self._table is None else indices % len(self)

    def remote_samples(self) -> RemoteSamples | None:
        if self._table is None:
            return super().remote_samples()
        shards = find_remote_shards(self._table, self.decoder.stored_fields)
        return None if shards is None else RemoteParts([shards], lambda indices: iter([(0, indices % len(self))]))

    def rng_keys(self, seed: int, epoch: int, indices: NDArray[np.int64], repetitions: Words | None = None) -> Words:
        # The rng keys do not depend on sources that may be added later.
        numbers, inner = self.divide(indices)
        words = [each.astype(np.uint64) for each in (numbers, indices // len(self), inner)]
        ids = derive_rng_key(derive_rng_key(*words[:2]), words[2])
        return augment_rng_keys(seed, epoch, ids.view(np.int64))

    def describe(self, index: int) -> tuple[str, str]:
        ((number, _, inner),) = self._divide(np.array([index]))
        part = self._parts[number]
        return part.describe(int(inner[0])) if isinstance(part.dataset, MapDataset) else (str(index), part.kind)

    def read(self, indices: NDArray[np.int64], rng_keys: Words) -> list[Any]:
        if self.obstacle is None:
            return super().read(indices, rng_keys)
        samples: list[Any] = [None] * len(indices)
        numbers, inner = self.divide(indices)
        repetitions = indices // len(self)
        for number, repetition in np.unique(np.stack([numbers, repetitions]), axis=1).T.tolist():
            rows = np.flatnonzero((numbers == number) & (repetitions == repetition))
            try:
                values = self._read_part(number, repetition, inner[rows], rng_keys[rows])
            except SampleError as error:
                raise error.at_row(int(rows[error.row])) from error
            except Exception as error:  # User code may raise anything; the error is raised again.
                place_mark(error, rows.tolist())
                raise
            for row, value in zip(rows.tolist(), values, strict=True):
                samples[row] = self._add_source(value, number) if self._has_source else value
        return samples

    def close(self) -> None:
        """Close all files until the next read."""
        self.reader.close()
        for part in self._parts:
            if isinstance(part.dataset, MapDataset):
                part.dataset.reader.close()

    def __len__(self) -> int:
        return self._order.num_all_samples

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mix": None}  # Workers read only the parts.

    def _add_source(self, sample: Any, number: int) -> Any:
        if isinstance(sample, dict) and "source" in sample:
            raise ValueError("samples already have a key 'source', which source_field=True would replace")
        return add_value(sample, "source", number)

    def _read_part(self, number: int, repetition: int, indices: NDArray[np.int64], rng_keys: Words) -> list[Any]:
        part = self._parts[number]
        if takes_rng_keys(part.dataset):
            return list(part.dataset.read(part.inner_indices(indices), rng_keys))
        # The user's code may read a shardio dataset, whose rng keys must differ for each source and repetition.
        seed = int(make_rng_key(self._seed, "source", number)[0] >> np.uint64(1))
        with known_epoch(seed, repetition):
            return read_samples(part.datasets[0], indices)
