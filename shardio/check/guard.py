"""guard: stop training at the first repeated sample."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

from shardio.check.identity import Key, content_ids, key_ids, keys_in
from shardio.errors import CoverageError

Batch = TypeVar("Batch")


class guard(Generic[Batch]):  # noqa: N801  # used like a function
    """Wrap a loader so that it raises when an epoch delivers a sample for the second time.

    >>> list(guard([["a", "b"], ["c"]]))
    [['a', 'b'], ['c']]
    >>> list(guard([["a", "b"], ["b"]]))
    Traceback (most recent call last):
    shardio.errors.CoverageError: batch 1 repeats b, which came in batch 0 of this epoch

    Args:
        loader: Any iterable of batches.
        key: Where a batch has its keys, as for :func:`shardio.check.assert_exactly_once`.
    """

    def __init__(self, loader: Iterable[Batch], *, key: Key = None) -> None:
        self.loader = loader
        self._key = key

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # a loader without a length raises TypeError, as it should

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over the loader's next epoch."""
        seen: dict[int, int] = {}
        for number, batch in enumerate(self.loader):
            keys = keys_in(batch, self._key)
            ids = content_ids(batch) if keys is None else key_ids(keys)
            for place, identity in enumerate(ids.tolist()):
                if identity in seen:
                    name = f"the content of sample {place}" if keys is None else keys[place]
                    raise CoverageError(
                        f"batch {number} repeats {name}, which came in batch {seen[identity]} of this epoch"
                    )
                seen[identity] = number
            yield batch
