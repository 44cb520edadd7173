"""An epoch's batches from the calling process, for ``num_workers=0``."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from shardio.handover import Count, find_held, hand_over
from shardio.interruptions import let_through, no_end
from shardio.loader.failures import Failure
from shardio.loader.fetching.counting import count_samples, measure_since
from shardio.loader.fetching.fetchers import DatasetEndError, has_state, make_fetcher
from shardio.loader.fetching.indices import Indices, SamplerPosition
from shardio.loader.fetching.job import FetchJob
from shardio.loader.fetching.position import EpochPosition
from shardio.loader.stats import Tally


class CallerBatches:
    """The batches of one epoch. Each is fetched when it is requested.

    Args:
        job: What to fetch.
        indices: What each batch consists of.
        position: Where the epoch begins; it is updated with each batch that the user receives.
        tally: Counts what is delivered.

    Attributes:
        indices: As above.
    """

    def __init__(self, job: FetchJob, indices: Indices, position: EpochPosition, tally: Tally) -> None:
        self._job, self.indices, self._position, self._tally = job, indices, position, tally
        (worker,) = position.workers
        self._fetcher = make_fetcher(job, worker.state, follows_end=position.follows_end)
        self._fetcher.skip(worker.num_since)
        self._late_counts = list[Count]()  # Of a failed batch: it counts when the next one is requested.
        self._sampler_error: Exception | None = None
        self._is_open = True
        self._is_ahead = False  # Whether the dataset may be ahead of the user, because a wrapper holds batches back.
        self._is_between = True  # Whether the user has received, or passed over, all that was fetched.
        self._save()

    def __next__(self) -> Any:
        """Return the next batch, or a Failure instead.

        Raises:
            StopIteration: If the epoch has no further batch.
        """
        if not self._is_open:
            raise StopIteration
        if self._sampler_error is not None:
            return Failure(error=self._sampler_error)
        if not self._is_ahead and find_held() is not None:
            self.update_position()
            self._is_ahead = True
        began = time.perf_counter()
        hand_over(self._late_counts)
        self._late_counts, self._is_between = [], True
        try:
            index = self.indices.draw()
        except StopIteration:
            self._end()
            raise
        except Exception as error:  # A user's sampler failed.
            let_through(error)
            self._sampler_error = error
            return Failure(error=error)
        self._is_between = False
        try:
            samples = self._fetcher.fetch(index)
            state = self._fetcher.state() if self._is_ahead else None
            num_samples = count_samples(self._job, samples)
            batch = self._job.collate_fn(samples)
        except DatasetEndError:
            self._is_between = True
            self._end()
            raise StopIteration from None
        except Exception as error:
            let_through(error)
            self._late_counts = [partial(self._advance, self.indices.position, None)]
            return Failure(error=no_end(error))
        hand_over([partial(self._advance, self.indices.position, state)])
        self._is_between = True
        self._tally.times += (times := measure_since(began))
        self._tally.count_batch(num_samples, Counter(), times.python_s)
        return batch

    def is_ready(self, timeout_s: float) -> bool:
        """Return True: a request fetches the batch."""
        return True

    def update_position(self) -> None:
        """Put the dataset's state into the position."""
        if has_state(self._job.dataset) and not self._position.num_yielded:
            self.indices.prepare()  # If the sampler draws from the same generators as the dataset, it draws first.
        self._save()

    def close(self) -> None:
        """End the epoch."""
        if self._is_open:
            self._save()  # The state may be requested after the iterator is dropped.
            self._is_open = False

    def __del__(self, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_exiting() and hasattr(self, "_is_open"):
            self.close()

    def _save(self) -> None:
        if self._is_open and self._is_between and not self._is_ahead:
            self._set_state(self._fetcher.state())

    def _advance(self, sampler: SamplerPosition, state: dict[str, Any] | None) -> None:
        position = self._position
        position.num_yielded += 1
        position.sampler = sampler
        position.workers[0].num_since += 1
        self._set_state(state)

    def _set_state(self, state: dict[str, Any] | None) -> None:
        if state is not None:
            worker = self._position.workers[0]
            worker.state, worker.num_since = state, 0

    def _end(self) -> None:
        hand_over([partial(self._finish, self._fetcher.state() if self._is_ahead else None)])
        self.close()

    def _finish(self, state: dict[str, Any] | None) -> None:
        self._position.is_finished = True
        self._position.sampler = self.indices.position
        self._set_state(state)
