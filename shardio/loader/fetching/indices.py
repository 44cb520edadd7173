"""What a loader's sampler yields in an epoch, from any batch on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import BatchSampler

from shardio.loader.fetching.fetchers import dump_state, has_state, load_state
from shardio.loader.fetching.random_states import OwnGenerators, drawing_from

_SAMPLES_YIELDED, _SAMPLER_STATE, _SAMPLER_ITER_STATE = "samples_yielded", "sampler_state", "sampler_iter_state"
_HAS_ENDED = "has_ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerPosition:
    """Where a sampler is.

    Attributes:
        num_yielded: How many times it has yielded.
        num_samples: How many samples that were; None if the batches are not those of torch's BatchSampler.
        sampler_state: The state of the sampler; None if it has none.
        iterator_state: That of its iterator.
    """

    num_yielded: int = 0
    num_samples: int | None = None
    sampler_state: Any = None
    iterator_state: Any = None


class Indices:
    """An epoch of a loader's sampler.

    Samplers with a state of their own are asked for it, and receive it to resume. Any other sampler yields the same
    again, given the same generators, and what was yielded before is dropped; no sample is read for that.

    Args:
        sampler: Yields what each batch consists of: the loader's batch sampler or, without batches, its sampler.
        generators: The generators from which the sampler draws; None for those of the process.

    Attributes:
        position: Where the sampler is.
    """

    def __init__(self, sampler: Any, generators: OwnGenerators | None) -> None:
        self._sampler, self._generators = sampler, generators
        self._batches = _BatchIterator(sampler) if type(sampler) is BatchSampler else None
        with drawing_from(self._generators):
            self._iterator: Iterator[Any] = self._batches or iter(sampler)
        self._prepared = list[Any]()  # What was drawn, but not yielded.
        self.position = SamplerPosition()
        self._track()

    def resume(self, position: SamplerPosition, skip: Callable[[Any], None] | None = None) -> None:
        """Go to a position in the epoch.

        Args:
            position: The position.
            skip: Called with what is yielded before, if the sampler has no state.
        """
        with drawing_from(self._generators):
            if not self._restore(position):
                for batch in self._before(position):
                    if skip is not None:
                        skip(batch)
        self.position = position

    def begin_after(self, position: SamplerPosition) -> None:
        """Begin the epoch after one that ended at a position."""
        with drawing_from(self._generators):
            if not self._restore(position):
                return
            if self._batches is not None:
                self._batches.has_ended = False
            # Some samplers' states say where the next epoch begins, others that this one is over.
            first = list(itertools.islice(self._iterator, 1))
            if first:
                self._iterator = itertools.chain(first, self._iterator)
            else:
                self._batches = None if self._batches is None else _BatchIterator(self._sampler)
                self._iterator = self._batches or iter(self._sampler)
        self.position = SamplerPosition()
        self._track()

    def prepare(self) -> None:
        """Draw the random numbers of a sampler that has no state now, not with the first batch."""
        if not self._prepared and self.position.sampler_state is None and self.position.iterator_state is None:
            with drawing_from(self._generators):
                self._prepared = list(itertools.islice(self._iterator, 1))

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self.draw()

    def draw(self) -> Any:
        """Return what the sampler yields next.

        Raises:
            StopIteration: At the end.
        """
        with drawing_from(self._generators):
            try:
                index = self._prepared.pop() if self._prepared else next(self._iterator)
            except StopIteration:
                self._track()
                raise
        self._track(1)
        return index

    def _before(self, position: SamplerPosition) -> Iterator[Any]:
        """Return an iterator over what is yielded before a position. The batches may have been of another size then."""
        num_samples = position.num_samples
        if num_samples is None and isinstance(position.iterator_state, dict):
            num_samples = position.iterator_state.get(_SAMPLES_YIELDED)  # StatefulDataLoader counts them there.
        if self._batches is None or num_samples is None:
            return itertools.islice(self._iterator, position.num_yielded)
        return self._batches.pass_over(num_samples)

    def _restore(self, position: SamplerPosition) -> bool:
        """Restore the states of the sampler and its iterator; return whether they have any."""
        if self._batches is not None:
            return self._batches.restore(position.iterator_state)
        if position.sampler_state is not None:
            load_state(self._sampler, position.sampler_state)
            self._iterator = iter(self._sampler)
        if position.iterator_state is not None:
            load_state(self._iterator, position.iterator_state)
        return position.sampler_state is not None or position.iterator_state is not None

    def _track(self, num_drawn: int = 0) -> None:
        is_batched = self._batches is not None
        self.position = SamplerPosition(
            num_yielded=self.position.num_yielded + num_drawn,
            num_samples=None if self._batches is None else self._batches.num_samples,
            sampler_state=None if is_batched else dump_state(self._sampler),
            iterator_state=self._batches.state() if self._batches is not None else dump_state(self._iterator),
        )


class _BatchIterator(Iterator[list[Any]]):
    """The batches of torch's BatchSampler, with the states of what is in it.

    As in torch, a batch size that the program sets applies to the next batch or, with ``drop_last``, the next epoch.

    Attributes:
        num_samples: How many samples were yielded.
        has_ended: Whether the sampler has yielded all.
    """

    def __init__(self, batch_sampler: BatchSampler) -> None:
        self._batch_sampler = batch_sampler
        self._sampler: Any = batch_sampler.sampler
        self._iterator: Iterator[Any] | None = None  # Made by the first batch, as in torch: samplers may draw then.
        self._only_size: int | None = None  # Of all batches of the epoch, with drop_last.
        self.num_samples = 0
        self.has_ended = False

    def __next__(self) -> list[Any]:
        iterator = self._begun()
        size = self._only_size or self._batch_sampler.batch_size
        batch = [] if self.has_ended else list(itertools.islice(iterator, size))
        self.num_samples += len(batch)
        self.has_ended = len(batch) < size  # Samplers often reset themselves then.
        if not batch or (self._only_size is not None and self.has_ended):
            raise StopIteration
        return batch

    def pass_over(self, num_samples: int) -> Iterator[list[Any]]:
        """Yield a number of samples in batches, however these are cut."""
        size = self._batch_sampler.batch_size
        while self.num_samples < num_samples:
            batch = list(itertools.islice(self._begun(), min(size, num_samples - self.num_samples)))
            if not batch:
                return
            self.num_samples += len(batch)
            yield batch

    def state(self) -> Any:
        """Return the states; None if the sampler and its iterator have none."""
        states: dict[str, Any] = {_SAMPLES_YIELDED: self.num_samples, _HAS_ENDED: self.has_ended}
        if has_state(self._sampler):
            states[_SAMPLER_STATE] = dump_state(self._sampler)
        if self._iterator is not None and has_state(self._iterator):
            states[_SAMPLER_ITER_STATE] = dump_state(self._iterator)
        return states if len(states) > 2 else None

    def restore(self, states: Any) -> bool:
        """Restore the states; return whether there are any."""
        if states is None or not (_SAMPLER_STATE in states or _SAMPLER_ITER_STATE in states):
            return False
        if _SAMPLER_STATE in states:
            load_state(self._sampler, states[_SAMPLER_STATE])
        self._iterator = None
        if _SAMPLER_ITER_STATE in states:
            load_state(self._begun(), states[_SAMPLER_ITER_STATE])
        self.num_samples, self.has_ended = states[_SAMPLES_YIELDED], states.get(_HAS_ENDED, False)
        return True

    def _begun(self) -> Iterator[Any]:
        if self._iterator is None:
            self._iterator = iter(self._sampler)
            self._only_size = self._batch_sampler.batch_size if self._batch_sampler.drop_last else None
        return self._iterator
