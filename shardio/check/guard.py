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


class guard(Generic[Batch]):  # noqa: N801  # used like a function
    """Wrap a loader so that it raises when an epoch delivers a sample for the second time.

    >>> list(guard([["a", "b"], ["c"]]))
    [['a', 'b'], ['c']]
    >>> list(guard([["a", "b"], ["b"]], key=list))
    Traceback (most recent call last):
    shardio.errors.CoverageError: batch 1 repeats b, which came in batch 0 of this epoch

    Without keys samples are known by their content, which augmentation changes: then iterating raises an IdentityError.
    To see whether it does, a few samples of a map-style dataset are read again before the first batch is handed out.

    Args:
        loader: Any iterable of batches.
        key: Where a batch has its keys, as for :func:`shardio.check.assert_exactly_once`.
    """

    def __init__(self, loader: Iterable[Batch], *, key: Key = None) -> None:
        self.loader = loader
        self._key = key
        self._claims: RankEpoch | None = None
        self._former: set[int] = set()  # The contents of the epochs before.

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # a loader without a length raises TypeError, as it should

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # Not set yet, as while it is unpickled.
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over the loader's next epoch.

        Raises:
            CoverageError: At the first repeated sample, which is named.
            IdentityError: If samples cannot be identified without keys.
        """
        seen: dict[int, int] = {}
        by_content, num_new = False, 0
        has_marks = marks_repeats(source_of(self.loader))
        for number, batch in enumerate(self.loader):
            keys = keys_in(batch, self._key)
            valid = find_marks(batch) if has_marks else None
            if keys is None:
                by_content = True
                ids = self._content_ids(batch)
                ids = ids if valid is None else ids[valid]
            else:
                keys = leave_out_marked(keys, valid)
                ids = key_ids(keys)
            for place, identity in enumerate(ids.tolist()):
                if identity in seen:
                    self._refuse(number, None if keys is None else keys[place], seen[identity])
                seen[identity] = number
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
                    "samples are known by their content, which is not the same each time: "
                    f"{self._claims.instability}. Give guard(…, key=) to identify samples"
                )
        return content_ids(batch, is_collated=collates_columns(source_of(self.loader)))

    def _refuse(self, number: int, key: object, earlier: int) -> None:
        if key is not None:
            is_given = self._key is not None
            taken = "" if is_given else " (text and integers alone are taken for keys; otherwise give key=)"
            raise CoverageError(f"batch {number} repeats {key}, which came in batch {earlier} of this epoch{taken}")
        raise IdentityError(
            f"batch {number} holds a sample with the content of one in batch {earlier} of this epoch, which may be a "
            f"repeat "
            "or equal data: give guard(…, key=) to identify samples"
        )

    def _check_contents(self, num_seen: int, num_new: int) -> None:
        """Refuse contents once there are more of them than samples."""
        assert self._claims is not None, "found with the first content"
        claimed, number = self._claims.num_claimed, self._claims.num_dataset
        if claimed is not None and num_seen > claimed:
            raise CoverageError(
                f"{num_seen} samples came in this epoch, where the loader has {claimed}: some came again, with other "
                "contents; give guard(…, key=) to see which"
            )
        if number is not None:
            self._refuse_changes(len(self._former) + num_new, number)

    def _remember(self, seen: dict[int, int]) -> None:
        """Compare an epoch's contents with those of the ones before, where it holds all samples."""
        assert self._claims is not None, "found with the first content"
        together = self._former | seen.keys()
        if self._former and self._claims.num_dataset is None and find_world().world_size == 1:
            # An epoch that was resumed has fewer samples than the next one.
            self._refuse_changes(len(together), max(len(self._former), len(seen)))
        self._former = together

    def _refuse_changes(self, num_contents: int, number: int) -> None:
        if num_contents > number:
            raise IdentityError(
                f"{num_contents} contents came of {number} samples: they change from one epoch to the next (random "
                "augmentation?), so repeats cannot be seen. Give guard(…, key=) to identify samples"
            )
