"""guard: stop training at the first repeated sample."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

from shardio.check.claims import RankEpoch, collates_columns, find_claims, source_of
from shardio.check.identity import Ids, Key, content_ids, key_ids, keys_in
from shardio.check.recording import find_marks, leave_out_marked, marks_repeats
from shardio.check.stability import probe_contents
from shardio.errors import CoverageError, IdentityError
from shardio.world import find_world

Batch = TypeVar("Batch")

_ASK_FOR_KEY = "Pass guard(…, key=) to identify samples"


class guard(Generic[Batch]):  # noqa: N801  # used like a function
    """Wrap a loader to raise an error when an epoch repeats a sample.

    >>> list(guard([["a", "b"], ["c"]]))
    [['a', 'b'], ['c']]
    >>> list(guard([["a", "b"], ["b"]], key=list))
    Traceback (most recent call last):
    shardio.errors.CoverageError: batch 1 repeats b, which batch 0 of this epoch delivered

    Without keys, samples are identified by their content. If random augmentation changes the
    content, iteration raises an IdentityError. To detect this, a few samples of a map-style
    dataset are read several times before the first batch.

    Args:
        loader: Any iterable of batches.
        key: How to find a batch's keys, as in :func:`shardio.check.assert_exactly_once`.
    """

    def __init__(self, loader: Iterable[Batch], *, key: Key = None) -> None:
        self.loader = loader
        self._key = key
        self._claims: RankEpoch | None = None
        self._former: set[int] = set()  # The contents of earlier epochs.

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # a loader without a length raises TypeError

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # Not set yet, for example during unpickling.
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over the loader's next epoch.

        Raises:
            CoverageError: At the first repeated sample. The message names it.
            IdentityError: If samples cannot be identified without keys.
        """
        seen: dict[int, int] = {}
        by_content, num_new = False, 0
        has_marks = marks_repeats(source_of(self.loader))
        for batch_number, batch in enumerate(self.loader):
            keys = keys_in(batch, self._key)
            valid = find_marks(batch) if has_marks else None
            if keys is None:
                by_content = True
                ids = self._content_ids(batch)
                ids = ids if valid is None else ids[valid]
            else:
                keys = leave_out_marked(keys, valid)
                ids = key_ids(keys)
            for row, identity in enumerate(ids.tolist()):
                if identity in seen:
                    self._refuse(batch_number, None if keys is None else keys[row], seen[identity])
                seen[identity] = batch_number
                num_new += identity not in self._former
            if by_content:
                self._check_contents(len(seen), num_new)
            yield batch
        if by_content:
            self._remember(seen)

    def _content_ids(self, batch: Batch) -> Ids:
        if self._claims is None:
            self._claims = probe_contents(source_of(self.loader), find_claims(self.loader, find_world().world_size))
            if self._claims.instability:
                raise IdentityError(
                    "samples are identified by their content, which changes from read to read: "
                    f"{self._claims.instability}. {_ASK_FOR_KEY}"
                )
        return content_ids(batch, is_collated=collates_columns(source_of(self.loader)))

    def _refuse(self, batch_number: int, key: object, earlier: int) -> None:
        if key is not None:
            hint = "" if self._key is not None else f". If {key} does not identify a sample, pass key="
            raise CoverageError(
                f"batch {batch_number} repeats {key}, which batch {earlier} of this epoch delivered{hint}"
            )
        raise IdentityError(
            f"batch {batch_number} holds a sample with the same content as one in batch {earlier} of this epoch: it is "
            f"either a repeat or another sample with equal data. {_ASK_FOR_KEY}"
        )

    def _check_contents(self, num_seen: int, num_new: int) -> None:
        """Raise an error if there are more contents than samples."""
        assert self._claims is not None, "set with the first content"
        claimed, num_samples = self._claims.num_claimed, self._claims.num_dataset
        if claimed is not None and num_seen > claimed:
            raise CoverageError(
                f"this epoch delivered {num_seen} samples, but the loader has {claimed}: some were repeated with "
                f"different content. {_ASK_FOR_KEY}"
            )
        if num_samples is not None:
            self._refuse_changes(len(self._former) + num_new, num_samples)

    def _remember(self, seen: dict[int, int]) -> None:
        """Compare a complete epoch's contents with earlier epochs, if there is only one rank."""
        assert self._claims is not None, "set with the first content"
        together = self._former | seen.keys()
        if self._former and self._claims.num_dataset is None and find_world().world_size == 1:
            # A resumed epoch has fewer samples than the next one.
            self._refuse_changes(len(together), max(len(self._former), len(seen)))
        self._former = together

    def _refuse_changes(self, num_contents: int, num_samples: int) -> None:
        if num_contents > num_samples:
            raise IdentityError(
                f"{num_samples} samples had {num_contents} different contents: contents change from one epoch to the "
                f"next (random augmentation?), so repeats cannot be detected. {_ASK_FOR_KEY}"
            )
