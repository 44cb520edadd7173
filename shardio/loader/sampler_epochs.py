"""The epochs of a loader without shardio's order: the start of each epoch, and the sampler's indices."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from types import GeneratorType
from typing import Any

import torch
from torch.utils.data import BatchSampler

from shardio.loader.fetch_job import is_iterable
from shardio.loader.saved_state import (
    EpochPosition,
    OwnGenerators,
    RandomStates,
    SamplerPosition,
    States,
    capture,
    drawing_from,
    dump_state,
    has_state,
    load_position,
    load_state,
)


class Epochs:
    """The epochs of a loader.

    The order of torch's samplers is drawn from the global generators, or from those that the user passed. A state holds
    the states of these generators at the beginning of the epoch, and a loader that resumes draws that epoch from copies
    of them. The copies also serve later epochs, as long as the program does not seed, restore or use the generators.

    Attributes:
        keeps_seed: Whether the next epoch's workers, even new ones, have the seed of the previous workers.
        sampler: The loader's ``_index_sampler`` while an epoch begins; None otherwise. Subclasses of the loader
            may override this property and return a different sampler at each access.
    """

    def __init__(self) -> None:
        self.keeps_seed = False
        self.sampler: Any = None
        self._loaded: EpochPosition | None = None
        self._position: EpochPosition | None = None
        self._generators: OwnGenerators | None = None
        self._process_at_load: States = {}
        self._latest: weakref.ref[Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy has its own iterators.
        return {**self.__dict__, "_latest": None}

    @property
    def resumes(self) -> bool:
        """Whether the next epoch begins at the position of a loaded state."""
        return self._loaded is not None

    @property
    def base_seed(self) -> int | None:
        """The seed of the workers in the latest epoch; None if the seed is unknown, or no epoch has begun."""
        return None if self._position is None else self._position.base_seed

    def begin(
        self, loader: Any, *, has_new_workers: bool, skip: Callable[[Any], None] | None = None
    ) -> tuple[EpochPosition, Indices]:
        """Begin the next epoch.

        Args:
            loader: The loader.
            has_new_workers: Whether the loader's workers are started for this epoch; true if there are no workers.
            skip: Called with the sampler's value for each batch to skip, if the sampler has no state.

        Returns:
            The position at which the epoch begins, and the indices of the epoch's batches.
        """
        loaded, before = self._loaded, self._position
        has_new_workers = has_new_workers and not self.keeps_seed
        position = loaded
        if loaded is not None:
            loaded.fit(loader.num_workers)
            loaded.fit_batches(loader.batch_size or 0)
        if loaded is not None and not loaded.is_finished:
            self._restore_generators(loader, loaded)
        elif self._generators is not None:
            self._generators = self._generators.without_changed()
        if loaded is not None and loaded.is_finished:
            keeps = bool(loader.persistent_workers or not loader.num_workers)
            position = loaded.begin_next(self._capture(loader), keeps_workers=keeps)
        if position is None:
            position = EpochPosition.begin(
                loader.num_workers, is_iterable=is_iterable(loader), random_states=self._capture(loader)
            )
            position.draws_seed, position.sampler_epoch = has_new_workers, _find_epoch(self._find_sampler(loader))
            position.batch_size = loader.batch_size or 0
            if before is not None and not has_new_workers:
                position.base_seed = before.base_seed
                position.num_epochs_of_seed = before.num_epochs_of_seed + 1
        indices = self._begin_sampler(loader, position)
        if loaded is not None and loaded.is_finished:
            indices.begin_after(loaded.sampler)
        elif loaded is not None and not position.is_iterable:
            indices.resume(loaded.sampler, skip)
        self._loaded = self._latest = None
        self._position = position
        return position, indices

    def watch(self, batches: Any) -> None:
        """Register the current epoch's batches, by weak reference, so that a state can be obtained from them."""
        self._latest = weakref.ref(batches)

    def dump(self, loader: Any) -> dict[str, Any]:
        """Return the state; after an epoch's last batch, it describes the beginning of the next epoch."""
        if self._loaded is not None:
            return self._loaded.dump()
        position = self._position
        if position is None:
            position = EpochPosition.begin(
                loader.num_workers, is_iterable=is_iterable(loader), random_states=self._capture(loader)
            )
            position.sampler_epoch = _find_epoch(self._find_sampler(loader))
            return position.dump()
        if (batches := None if self._latest is None else self._latest()) is not None:
            batches.update_position()
        position.len_called = loader._IterableDataset_len_called
        if position.is_finished:
            position.random_states = self._capture(loader)
        return position.dump()

    def load(self, loader: Any, state: dict[str, Any]) -> None:
        """Begin the next epoch at the position of a state.

        Raises:
            StateError: If the state does not match the loader.
        """
        loaded = self._loaded = load_position(state, is_iterable=is_iterable(loader)) if state else None
        self._position = None
        if loaded is None:
            return
        if loaded.random_states is not None:
            self._process_at_load = capture(loaded.random_states.globals)
        if loaded.is_finished:
            self._restore_generators(loader, loaded)  # Restore now: the program may seed the generators later.
        if loaded.sampler_epoch is not None:
            # Set the sampler's epoch now, not when that epoch begins: some frameworks set it only after the epoch has
            # begun, or set a different one.
            for sampler in _find_epoch_samplers(self._find_sampler(loader)):
                sampler.set_epoch(loaded.sampler_epoch)

    def set_epoch(self, epoch: int) -> None:
        """Drop the loaded position if it is known to be in a different epoch, unless it is at that epoch's end."""
        loaded = self._loaded
        if loaded is not None and loaded.sampler_epoch not in (None, epoch) and not loaded.is_finished:
            self._loaded = None

    def _begin_sampler(self, loader: Any, position: EpochPosition) -> Indices:
        """Return the sampler's indices, and draw the seed of the workers.

        The calls follow those of torch's iterators, because samplers may draw in each call. torch's iterators call the
        sampler's ``__iter__``, draw a seed if their workers are new, and then, with workers, call ``__iter__`` again.
        """
        sampler = self._find_sampler(loader)
        indices = Indices(sampler, self._generators)
        if position.draws_seed or position.base_seed is None:
            with drawing_from(self._generators):
                position.base_seed = draw_seed(loader.generator)
            if loader.num_workers:
                indices = Indices(sampler, self._generators)
        return indices

    def _restore_generators(self, loader: Any, loaded: EpochPosition) -> None:
        if (states := loaded.random_states) is not None:
            for generator, state in zip(self._find_generators(loader), states.own, strict=False):
                generator.set_state(state)
            self._generators = OwnGenerators(states.globals, self._process_at_load)

    def _capture(self, loader: Any) -> RandomStates:
        modules = {type(each).__module__.partition(".")[0] for each in _find_samplers(self._find_sampler(loader))}
        includes_others = modules != {"torch"}
        states = RandomStates.capture(self._find_generators(loader), includes_others=includes_others)
        if self._generators is not None:
            states.globals = self._generators.cover(states.globals)
        return states

    def _find_sampler(self, loader: Any) -> Any:
        return loader._index_sampler if self.sampler is None else self.sampler

    def _find_generators(self, loader: Any) -> list[torch.Generator]:
        samplers = _find_samplers(self._find_sampler(loader))
        found = [loader.generator, *(getattr(sampler, "generator", None) for sampler in samplers)]
        return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())


def draw_seed(generator: torch.Generator | None) -> int:
    """Draw the workers' seed as torch does, from the given generator or, by default, from torch's global generator."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator).item())


def _find_samplers(outermost: Any) -> list[Any]:
    """Return the sampler that a loader draws from, and the samplers nested in it, outermost first."""
    found, inside = list[Any](), [outermost]
    while inside:
        sampler = inside.pop(0)
        if any(sampler is one for one in found):
            continue
        found.append(sampler)
        parts = (getattr(sampler, name, None) for name in ("batch_sampler", "sampler"))
        inside += [part for part in parts if part is not None]
    return found


def _find_epoch_samplers(outermost: Any) -> list[Any]:
    return [
        sampler
        for sampler in _find_samplers(outermost)
        if callable(getattr(sampler, "set_epoch", None)) and type(getattr(sampler, "epoch", None)) is int
    ]


def _find_epoch(outermost: Any) -> int | None:
    """Return the epoch of a loader's sampler; None if the sampler has no ``set_epoch``."""
    return next((int(sampler.epoch) for sampler in _find_epoch_samplers(outermost)), None)


_SAMPLES_YIELDED, _SAMPLER_STATE, _SAMPLER_ITER_STATE = "samples_yielded", "sampler_state", "sampler_iter_state"


_HAS_ENDED = "has_ended"


class Indices:
    """An epoch of a loader's sampler.

    If the sampler has a state, that state is saved, and is loaded when resuming. Otherwise, the sampler yields the same
    values again, given the same generators. The earlier values are dropped without reading samples.

    Args:
        sampler: The loader's batch sampler or, if it makes no batches, its sampler.
        generators: The generators from which the sampler draws; None for the process's generators.

    Attributes:
        position: The position of the sampler.
    """

    def __init__(self, sampler: Any, generators: OwnGenerators | None) -> None:
        self._sampler, self._generators = sampler, generators
        self._batches = _BatchIterator(sampler) if type(sampler) is BatchSampler else None
        with drawing_from(self._generators):
            self._iterator: Iterator[Any] = self._batches or iter(sampler)
        self._prepared = list[Any]()  # Drawn, but not yielded.
        self.position = SamplerPosition()
        self._track()

    def resume(self, position: SamplerPosition, skip: Callable[[Any], None] | None = None) -> None:
        """Move to a position in the epoch.

        Args:
            position: The position.
            skip: Called with each earlier value, if the sampler has no state.
        """
        with drawing_from(self._generators):
            if not self._restore(position):
                for batch in self._before(position):
                    if skip is not None:
                        skip(batch)
            elif self._batches is not None:
                self._batches.pass_end(position.iterator_state)
        self.position = position

    def begin_after(self, position: SamplerPosition) -> None:
        """Begin the next epoch, given the position at which the previous epoch ended."""
        with drawing_from(self._generators):
            if not self._restore(position):
                return
            if self._batches is not None:
                self._batches.has_ended = False
            # The loaded states of some samplers describe the beginning of the next epoch, and those of other samplers
            # describe the end of this epoch.
            first = list(itertools.islice(self._iterator, 1))
            if first:
                self._iterator = itertools.chain(first, self._iterator)
            else:
                self._batches = None if self._batches is None else _BatchIterator(self._sampler)
                self._iterator = self._batches or iter(self._sampler)
        self.position = SamplerPosition()
        self._track()

    def prepare(self) -> None:
        """Make a sampler without a state draw its random numbers now, not with the first batch."""
        if not self._prepared and self.position.sampler_state is None and self.position.iterator_state is None:
            with drawing_from(self._generators):
                self._prepared = list(itertools.islice(self._iterator, 1))

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        with drawing_from(self._generators):
            try:
                index = self._prepared.pop() if self._prepared else next(self._iterator)
            except StopIteration:
                self._track()
                raise
        self._track(1)
        return index

    def _before(self, position: SamplerPosition) -> Iterator[Any]:
        """Return an iterator over the values before a position that may have been saved with a different batch size."""
        num_samples = position.num_samples
        if num_samples is None and isinstance(position.iterator_state, dict):
            num_samples = position.iterator_state.get(_SAMPLES_YIELDED)  # In states of StatefulDataLoader.
        if self._batches is None or num_samples is None:
            return itertools.islice(self._iterator, position.num_yielded)
        return self._batches.pass_over(num_samples)

    def _restore(self, position: SamplerPosition) -> bool:
        if self._batches is not None:
            return self._batches.restore(position.iterator_state)
        if position.sampler_state is not None:
            load_state(self._sampler, position.sampler_state)
            self._iterator = iter(self._sampler)
        if position.iterator_state is not None:
            load_state(self._iterator, position.iterator_state)
        return position.sampler_state is not None or position.iterator_state is not None

    def _track(self, num_drawn: int = 0) -> None:
        num_yielded = self.position.num_yielded + num_drawn
        if self._batches is None:
            self.position = SamplerPosition(
                num_yielded=num_yielded,
                sampler_state=dump_state(self._sampler),
                iterator_state=dump_state(self._iterator),
            )
        else:
            self.position = SamplerPosition(
                num_yielded=num_yielded, num_samples=self._batches.num_samples, iterator_state=self._batches.state()
            )


class _BatchIterator(Iterator[list[Any]]):
    """The batches of torch's BatchSampler, and the states of its inner sampler and of that sampler's iterator.

    As in torch, a batch size that the program sets applies to the next batch or, with ``drop_last``, to the next epoch.

    Attributes:
        num_samples: The number of samples yielded so far.
        has_ended: Whether the sampler has yielded all of its values.
    """

    def __init__(self, batch_sampler: BatchSampler) -> None:
        self._batch_sampler = batch_sampler
        self._sampler: Any = batch_sampler.sampler
        # Created with the first batch, as in torch, because iter() may draw random numbers.
        self._iterator: Iterator[Any] | None = None
        self._only_size: int | None = None  # With drop_last, the size of every batch in the epoch.
        self.num_samples = 0
        self.has_ended = False

    def __next__(self) -> list[Any]:
        iterator = self._begun()
        size = self._only_size or self._batch_sampler.batch_size
        batch = [] if self.has_ended else list(itertools.islice(iterator, size))
        self.num_samples += len(batch)
        self.has_ended = len(batch) < size  # Do not call an exhausted sampler again: many samplers would start over.
        if not batch or (self._only_size is not None and self.has_ended):
            raise StopIteration
        return batch

    def pass_over(self, num_samples: int) -> Iterator[list[Any]]:
        """Yield the first ``num_samples`` samples, in batches of any size."""
        size = self._batch_sampler.batch_size
        while self.num_samples < num_samples:
            batch = list(itertools.islice(self._begun(), min(size, num_samples - self.num_samples)))
            if not batch:
                return
            self.num_samples += len(batch)
            yield batch

    def state(self) -> Any:
        states = dict[str, Any]()
        if has_state(self._sampler):
            states[_SAMPLER_STATE] = dump_state(self._sampler)
        if type(self._iterator) is not GeneratorType and has_state(self._iterator):  # Most iterators are generators.
            states[_SAMPLER_ITER_STATE] = dump_state(self._iterator)
        return {_SAMPLES_YIELDED: self.num_samples, _HAS_ENDED: self.has_ended, **states} if states else None

    def restore(self, states: Any) -> bool:
        if states is None or not (_SAMPLER_STATE in states or _SAMPLER_ITER_STATE in states):
            return False
        if _SAMPLER_STATE in states:
            load_state(self._sampler, states[_SAMPLER_STATE])
        self._iterator = None
        if _SAMPLER_ITER_STATE in states:
            load_state(self._begun(), states[_SAMPLER_ITER_STATE])
        self.num_samples, self.has_ended = states[_SAMPLES_YIELDED], states.get(_HAS_ENDED, False)
        return True

    def pass_end(self, states: dict[str, Any]) -> None:
        """If the loaded states were saved after an epoch's last sample, let the sampler end that epoch.

        Samplers whose states are at the end of the epoch yield nothing in the first iteration. The states of other
        samplers are at the beginning of the next epoch.
        """
        if self.has_ended and _SAMPLER_STATE in states and next(iter(self._sampler), None) is not None:
            load_state(self._sampler, states[_SAMPLER_STATE])

    def _begun(self) -> Iterator[Any]:
        if self._iterator is None:
            self._iterator = iter(self._sampler)
            self._only_size = self._batch_sampler.batch_size if self._batch_sampler.drop_last else None
        return self._iterator
