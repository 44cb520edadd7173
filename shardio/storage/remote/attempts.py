"""Try requests again until they succeed, within the limits of a store's options."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from tenacity import RetryCallState, Retrying, retry_if_exception_type
from tenacity.wait import wait_random_exponential

from shardio.errors import StoreError
from shardio.storage.descriptors import bound_requests
from shardio.storage.remote.backends import Purpose, make_backend
from shardio.storage.remote.failures import FailedRequestError, RequestFailure, explain
from shardio.storage.remote.options import RemoteOptions

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Backend

Result = TypeVar("Result")

FIRST_WAIT_S = 0.1
"""The upper bound of the first wait before a request is repeated. It doubles each time."""

MAX_WAIT_S = 20.0
"""The longest wait. S3 asks to slow down for a second or so; other servers are restarted within a minute."""

UNREACHED_RETRIES = 3
"""How often to repeat requests to a server that never answered: its name is probably wrong."""

KIND_RETRIES = {"unclear": 7, "unknown_size": 4}
"""How often to repeat requests whose answers do not fit them, or do not say how long the object is.

Damage on the way ends sooner. A cache that fetches an object of a few megabytes has all of it after a second.
"""


MIN_RANKS, MAX_START_DELAY_S, DELAY_PER_RANK_S = 16, 2.0, 0.002
"""How the first requests of many ranks are spread: see :func:`bound_start_delay`. Times are in seconds."""


def bound_start_delay(world_size: int) -> float:
    """Return the longest time in seconds for which a rank waits before its first request to a store.

    All ranks of a run start at the same time. Each waits for a random time, so that they do not all make their first
    requests at once.
    """
    return 0.0 if world_size < MIN_RANKS else min(MAX_START_DELAY_S, world_size * DELAY_PER_RANK_S)


class TryAgainError(FailedRequestError):
    """A request failed in a way that may end by itself."""


class NoRangesError(StoreError):
    """The server does not send parts of an object, but may send all of it."""


class Attempts:
    """A store's client, and the requests to it that may be repeated. Threads share it.

    Args:
        root: The root of the store.
        options: Its settings.
        world_size: The number of ranks that start at the same time.

    Attributes:
        max_requests: How many requests are made at a time.
    """

    def __init__(self, root: str, options: RemoteOptions, world_size: int = 1) -> None:
        self.root, self.options = root, options
        self._backends: dict[Purpose, Backend] = {}
        self._answered = False
        self.max_requests = bound_requests(options.max_requests)
        self._places = threading.BoundedSemaphore(self.max_requests)
        self._start_delay_s = random.uniform(0, bound_start_delay(world_size))
        self._starting = threading.Lock()

    @property
    def is_protected(self) -> bool:
        """Whether TLS protects what is transferred."""
        config = dict(self.options.config)
        allows_http = config.get("allow_http") or os.environ.get("AWS_ALLOW_HTTP", "")
        return not self.root.startswith("http://") and allows_http.lower() not in ("1", "true")

    def make(self, what: str, request: Callable[[Backend], Result], *, purpose: Purpose = "read") -> Result:
        """Make a request until it succeeds.

        Args:
            what: What is requested, for messages: ``read s3://bucket/key``.
            request: Makes the request. Progress that it keeps to itself is not lost when it is called again.
            purpose: The purpose that its client serves.

        Raises:
            FileNotFoundError: If the object does not exist.
            PermissionError: If the credentials do not allow the request.
            ReplacedError: If the object was replaced.
            EOFError: If the object ends before the requested range.
            NoRangesError: If the server does not send parts of the object.
            StoreError: If the request keeps failing, or cannot succeed.
        """
        self._wait_to_start()
        began = time.monotonic()
        try:
            return self._make_once(what, request, purpose)  # Nearly always enough, and tenacity takes 60 µs.
        except TryAgainError as error:
            return self._make_again(what, request, began, error, purpose=purpose)

    def _make_again(
        self, what: str, request: Callable[[Backend], Result], began: float, first: TryAgainError, *, purpose: Purpose
    ) -> Result:
        """Repeat a request that has failed once, after a wait."""
        failed, kinds = [first], Counter[str]()
        ends, wait = began + self.options.deadline_s, wait_random_exponential(multiplier=FIRST_WAIT_S, max=MAX_WAIT_S)

        def attempt() -> Result:
            if failed:  # Tenacity counts the first attempt, too.
                raise failed.pop()
            return self._make_once(what, request, purpose)

        retrying = Retrying(
            stop=lambda state: self._gives_up(state, kinds) or time.monotonic() >= ends,
            wait=lambda state: min(wait(state), max(0.0, ends - time.monotonic())),
            retry=retry_if_exception_type(TryAgainError),
            reraise=True,
        )
        try:
            result: Result = retrying(attempt)
        except TryAgainError as error:
            num_attempts = int(retrying.statistics["attempt_number"])
            raise self._give_up(what, error.failure, num_attempts, time.monotonic() - began) from None
        return result

    def _wait_to_start(self) -> None:
        """Wait before the first request. Others that come in the meantime wait, too."""
        with self._starting:
            if self._start_delay_s:
                time.sleep(self._start_delay_s)  # Other ranks make their first requests in the meantime.
                self._start_delay_s = 0.0

    def _make_once(self, what: str, request: Callable[[Backend], Result], purpose: Purpose) -> Result:
        from obstore.exceptions import BaseError

        with self._places:
            backend = self._backends.get(purpose)
            if backend is None:
                backend = self._backends[purpose] = make_backend(self.root, self.options, purpose)
            try:
                result = request(backend)
            except (BaseError, FailedRequestError, FileNotFoundError, TimeoutError) as error:
                self._raise(what, explain(error), backend)
        self._answered = True
        return result

    def _raise(self, what: str, failure: RequestFailure, backend: Backend) -> None:
        """Raise what a failure means to the caller."""
        self._answered |= failure.reached
        if self.root.startswith("http"):
            if failure.kind == "expired":  # There are no credentials that could be read again.
                failure = replace(failure, kind="denied")
        elif failure.kind == "no_ranges":  # Object stores send parts of all objects.
            failure = replace(failure, kind="unclear")
        match failure.kind:
            case "missing":
                raise FileNotFoundError(errno.ENOENT, f"cannot {what}: {failure.cause}")
            case "denied":
                remedy = (
                    "shardio does not log in to web servers: check the access rights there, or download the files"
                    if self.root.startswith("http")
                    else "Check the credentials, in the environment or storage_options, and what they allow"
                )
                raise PermissionError(errno.EACCES, f"cannot {what}: {failure.cause}. {remedy}")
            case "beyond_end":
                raise EOFError(f"cannot {what}: {failure.cause}")
            case "no_ranges":
                raise NoRangesError(f"cannot {what}: {failure.cause}. {failure.remedy}")
            case "permanent":
                remedy = failure.remedy or "Check the URL and the storage options"
                raise StoreError(f"cannot {what}: {failure.cause}. {remedy}")
            case "expired":
                if backend in self._backends.values():
                    self._backends = {}  # The next ones read the credentials again.
        raise TryAgainError(failure)

    def _gives_up(self, state: RetryCallState, kinds: Counter[str]) -> bool:
        """Return whether a request has failed too often. It is called once after each attempt."""
        assert state.outcome is not None, "the attempt has ended"
        error = state.outcome.exception()
        assert isinstance(error, TryAgainError), "others are not repeated"
        kinds[error.failure.kind] += 1
        retries = self.options.retries
        if not self._answered:
            retries = min(retries, UNREACHED_RETRIES)
        return state.attempt_number > retries or any(kinds[kind] > limit for kind, limit in KIND_RETRIES.items())

    def _give_up(self, what: str, failure: RequestFailure, num_attempts: int, elapsed_s: float) -> StoreError:
        remedy = failure.remedy or (
            "The credentials have expired: renew them"
            if failure.kind == "expired"
            else "Check the server"
            if failure.kind == "unclear"
            else "Check the network and the server"
            if self._answered
            else "Check the URL, the endpoint and the proxy in the storage options or the environment, and the network"
        )
        times = f"after {num_attempts} attempts in {elapsed_s:.0f} s" if num_attempts > 1 else "at the first attempt"
        return StoreError(f"cannot {what} {times}: {failure.cause}. {remedy}")
