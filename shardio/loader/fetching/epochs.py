"""The epochs of a loader without shardio's order: the start of each, and the state of the latest one."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from shardio.loader.fetching.fetchers import OwnGenerators, RandomStates, States, capture, drawing_from, is_iterable
from shardio.loader.fetching.position import EpochPosition, Indices, load_position


class Epochs:
    """The epochs of a loader.

    The order of torch's samplers is drawn from the global generators, or from those that the user passed. A state holds
    their states at the beginning of the epoch, and a loader that resumes draws that epoch from a copy. The copy also
    serves later epochs, as long as the program itself does not seed, restore or use the generators.

    Attributes:
        keeps_seed: Whether the next epoch's workers have the seed of the previous ones, although they may be new.
        sampler: The loader's ``_index_sampler`` while an epoch begins; None otherwise. Subclasses override that
            property, and may return another sampler at each access.
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
        """The seed of the workers in the latest epoch; None if there is none."""
        return None if self._position is None else self._position.base_seed

    def begin(
        self, loader: Any, *, has_new_workers: bool, skip: Callable[[Any], None] | None = None
    ) -> tuple[EpochPosition, Indices]:
        """Begin the next epoch.

        Args:
            loader: The loader.
            has_new_workers: Whether its workers are started for this epoch; true without workers.
            skip: Called with the sampler's value for each batch before the beginning, if it has no state.

        Returns:
            The position at which it begins, and the indices of its batches.
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
        """Ask the batches of the epoch in flight when a state is requested, as long as they exist."""
        self._latest = weakref.ref(batches)

    def dump(self, loader: Any) -> dict[str, Any]:
        """Return the state. After the last batch of an epoch, it is the beginning of the next one."""
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
            StateError: If the state does not fit the loader.
        """
        loaded = self._loaded = load_position(state, is_iterable=is_iterable(loader)) if state else None
        self._position = None
        if loaded is None:
            return
        if loaded.random_states is not None:
            self._process_at_load = capture(loaded.random_states.globals)
        if loaded.is_finished:
            self._restore_generators(loader, loaded)  # Now: the program may seed them for the next epoch.
        if loaded.sampler_epoch is not None:
            # Now, not when the epoch begins: frameworks set it after they have begun the epoch, or to another epoch.
            for sampler in _find_epoch_samplers(self._find_sampler(loader)):
                sampler.set_epoch(loaded.sampler_epoch)

    def set_epoch(self, epoch: int) -> None:
        """Drop the loaded position if it is known to be in another epoch, unless it is at that epoch's end."""
        loaded = self._loaded
        if loaded is not None and loaded.sampler_epoch not in (None, epoch) and not loaded.is_finished:
            self._loaded = None

    def _begin_sampler(self, loader: Any, position: EpochPosition) -> Indices:
        """Return the sampler's indices, and draw the seed of the workers.

        The order is that of torch's iterators, because samplers may draw in each call: they call the sampler's
        ``__iter__``, draw a seed if their workers are new, and then, with workers, call ``__iter__`` again.
        """
        sampler = self._find_sampler(loader)
        indices = Indices(sampler, self._generators)
        if position.draws_seed or position.base_seed is None:
            with drawing_from(self._generators):
                seed = torch.empty((), dtype=torch.int64, device="cpu").random_(generator=loader.generator)
            position.base_seed = int(seed.item())
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


def _find_samplers(outermost: Any) -> list[Any]:
    """Return the sampler that a loader draws from, and those inside it, from the outside in."""
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
    """Return the epoch of a loader's sampler; None if that has no ``set_epoch``."""
    return next((int(sampler.epoch) for sampler in _find_epoch_samplers(outermost)), None)
