"""Make obstore's clients, and repeat their requests until they succeed."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from tenacity import RetryCallState, Retrying, retry_if_exception_type
from tenacity.wait import wait_random_exponential

from shardio.errors import LocationError, StoreError
from shardio.storage.local import bound_requests
from shardio.storage.options import RemoteOptions
from shardio.storage.remote import messages
from shardio.storage.remote.failures import FailedRequestError, RequestFailure, explain
from shardio.storage.remote.hub import OPTIONS, HubRepository, HubStore

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Backend


CONNECT_S = 5.0
"""The maximum time in seconds to connect to a server, unless ``timeout_s`` is shorter."""

TIMEOUTS_PER_REQUEST = 6
"""The maximum time of a request that makes progress, in multiples of ``timeout_s``: a server that sends a byte now and
then must not hold it forever."""

CLIENT_OPTIONS = {
    "allow_http",
    "allow_invalid_certificates",
    "proxy_ca_certificate",
    "proxy_excludes",
    "proxy_url",
    "randomize_addresses",
    "root_certificate",
    "user_agent",
}
"""The options of obstore's HTTP client. All other options belong to the backend."""

_FLAGS = {"allow_http", "allow_invalid_certificates", "randomize_addresses"}

_MEMORY: dict[str, Backend] = {}
"""The stores of ``memory://`` URLs by their roots. They live as long as the storage process."""

_REPOSITORIES: dict[tuple[str, RemoteOptions], HubRepository] = {}
"""The repositories of ``hf://`` URLs. They keep their commits as long as the storage process lives."""

Result = TypeVar("Result")

Purpose = Literal["read", "upload", "whole"]
"""The purpose of a client: most requests; uploads, whose parts obstore repeats one by one; and requests for an object
of any size as a whole, which may take any time."""

FIRST_WAIT_S = 0.1
"""The upper bound in seconds of the first wait before a request is repeated. It doubles each time."""

MAX_WAIT_S = 20.0
"""The longest wait in seconds. S3 asks to slow down for a second or so; other servers restart within a minute."""

UNREACHED_RETRIES = 3
"""The number of times to repeat requests to a server that never answered: its name is probably wrong."""

KIND_RETRIES = {"unclear": 7, "unknown_size": 4}
"""The number of times to repeat requests whose answers do not fit them, or do not say how long the object is.

Damage on the way ends sooner. A cache that fetches an object of a few megabytes has the whole object after a second.
"""

MIN_RANKS, MAX_START_DELAY_S, DELAY_PER_RANK_S = 16, 2.0, 0.002
"""The settings that spread the first requests of many ranks: see :func:`bound_start_delay`. Times are in seconds."""

MAX_TRANSFER = timedelta(days=7)
"""The time limit of obstore's client for objects of any size."""


def make_backend(root: str, options: RemoteOptions, purpose: Purpose) -> Backend:
    """Return a new client for a store. It reads credentials from the options, the environment and profiles.

    Args:
        root: The root of the store, as :func:`~shardio.storage.remote.messages.split_url` returns it.
        options: The settings.
        purpose: What the client is for.

    Raises:
        LocationError: If an option is unknown or invalid.
    """
    from obstore import exceptions, store

    scheme, _, authority = root.partition("://")
    if scheme == "memory":
        return _MEMORY.setdefault(root, store.MemoryStore())
    config = dict(options.config)
    common: dict[str, Any] = {
        "client_options": _client_options(config, scheme, options, purpose),
        "retry_config": {
            "max_retries": options.retries if purpose == "upload" else 0,
            "retry_timeout": timedelta(seconds=options.deadline_s),
        },
    }
    own: Any = {name: value for name, value in config.items() if name not in CLIENT_OPTIONS}
    if scheme == messages.SCHEME:
        return _make_hub_store(root, options, common, own.keys() - OPTIONS)
    try:
        match scheme:
            case "s3":
                return store.S3Store(authority, config=own, **_find_profile(own), **common)
            case "gs":
                return store.GCSStore(authority, config=own, **common)
            case "az":
                return store.AzureStore(authority, config=own, **common)
            case _:
                if own:
                    raise _unknown_options(root, own)
                return store.HTTPStore.from_url(root, **common)
    except exceptions.BaseError as error:
        message = str(error).partition("\n")[0]
        raise LocationError(f"cannot use {root}: {message}. Check the storage options and the environment") from None


def _make_hub_store(root: str, options: RemoteOptions, common: dict[str, Any], unknown: Collection[str]) -> Backend:
    if unknown:
        raise _unknown_options(root, unknown)
    repository = _REPOSITORIES.get((root, options))
    if repository is None:
        repository = _REPOSITORIES.setdefault((root, options), HubRepository(root, options))
    # It has only the reading methods of obstore's stores, because shardio does not write to repositories.
    return cast("Backend", HubStore(repository, common))


def _unknown_options(root: str, names: Collection[str]) -> LocationError:
    return LocationError(f"unknown options for {root}: {', '.join(sorted(names))}")


def _client_options(config: Mapping[str, str], scheme: str, options: RemoteOptions, purpose: Purpose) -> dict[str, Any]:
    timeout_s = options.timeout_s
    found: dict[str, Any] = {
        "connect_timeout": timedelta(seconds=min(CONNECT_S, timeout_s)),
        "read_timeout": timedelta(seconds=timeout_s),
        "timeout": MAX_TRANSFER if purpose == "whole" else timedelta(seconds=TIMEOUTS_PER_REQUEST * timeout_s),
        "pool_idle_timeout": timedelta(seconds=15),  # Shorter than most servers'.
        "pool_max_idle_per_host": str(bound_requests(options.max_requests)),
    }
    for name in CLIENT_OPTIONS & config.keys():
        found[name] = _read_flag(name, config[name]) if name in _FLAGS else config[name]
    # These options replace those that object_store reads from the environment.
    if scheme == "http" or os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true"):
        found.setdefault("allow_http", True)
    return found


def _read_flag(name: str, text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise LocationError(f"the storage option {name} must be true or false, got {text!r}")
    return text.lower() == "true"


def _find_profile(config: dict[str, str]) -> dict[str, Any]:
    """Return boto3's credentials from profiles and ``~/.aws``, where object_store itself finds none.

    This removes the option ``profile`` from ``config``.

    Raises:
        LocationError: If boto3 is missing, or the profile does not exist or has no credentials.
    """
    profile = config.pop("profile", None)
    explicit = {"access_key_id", "aws_access_key_id", "skip_signature", "aws_skip_signature"} & config.keys()
    if explicit or (profile is None and not _has_aws_files()):
        return {}
    try:
        import boto3  # type: ignore[import-untyped]  # It has no types.
        import botocore.exceptions  # type: ignore[import-untyped]  # It has no types.
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        if profile is None:
            return {}
        raise LocationError("storage_options['profile'] needs boto3: pip install boto3") from None
    try:
        session = boto3.Session(profile_name=profile)
        has_credentials = session.get_credentials() is not None
    except botocore.exceptions.BotoCoreError as error:
        raise LocationError(
            f"cannot get credentials for S3: {error}. Check the profile in the storage options or AWS_PROFILE, and the "
            "files in ~/.aws"
        ) from None
    if profile is not None and not has_credentials:
        raise LocationError(f"the profile {profile!r} has no credentials: add them to ~/.aws/credentials")
    return {"credential_provider": Boto3CredentialProvider(session)} if has_credentials else {}


def _has_aws_files() -> bool:
    if os.environ.get("AWS_ACCESS_KEY_ID"):
        return False
    files = (
        os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"),
        os.environ.get("AWS_CONFIG_FILE", "~/.aws/config"),
    )
    return any(os.path.exists(os.path.expanduser(file)) for file in files)  # noqa: PTH110, PTH111  # They are strings.


def bound_start_delay(world_size: int) -> float:
    """Return the maximum time in seconds for which a rank waits before its first request to a store.

    All ranks of a run start at the same time. Each waits for a random time, so that the first requests do not come at
    once.
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
        max_requests: The maximum number of requests at a time.
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
        """Whether TLS protects transfers."""
        config = dict(self.options.config)
        allows_http = config.get("allow_http") or os.environ.get("AWS_ALLOW_HTTP", "")
        return not self.root.startswith("http://") and allows_http.lower() not in ("1", "true")

    def make(self, what: str, request: Callable[[Backend], Result], *, purpose: Purpose = "read") -> Result:
        """Make a request until it succeeds.

        Args:
            what: The request in words, for messages: ``read s3://bucket/key``.
            request: The function that makes the request. It may keep its progress for the next call.
            purpose: The purpose of its client.

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
            if failed:  # The first attempt counts as one of tenacity's.
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
        """Wait before the first request. Requests that come in the meantime wait for it."""
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
        """Raise the error by which a caller recognises a failure."""
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
        assert isinstance(error, TryAgainError), "other errors are not repeated"
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
