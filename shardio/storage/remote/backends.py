"""Make obstore's clients. Only the storage process calls this, because obstore's threads do not survive a fork."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, cast

from shardio.errors import LocationError
from shardio.storage.descriptors import bound_requests
from shardio.storage.remote import hub_names
from shardio.storage.remote.hub_repository import HubRepository
from shardio.storage.remote.hub_requests import OPTIONS
from shardio.storage.remote.hub_store import HubStore
from shardio.storage.remote.options import RemoteOptions

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Backend

CONNECT_S = 5.0
"""The longest time in seconds to connect to a server, if ``timeout_s`` is not shorter."""

TIMEOUTS_PER_REQUEST = 6
"""A request that makes progress may take this many times ``timeout_s``: a server that sends a byte now and then must
not hold it for ever."""

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
"""The options of obstore's HTTP client. All others are those of the backend."""

_FLAGS = {"allow_http", "allow_invalid_certificates", "randomize_addresses"}

_MEMORY: dict[str, Backend] = {}
"""The stores of ``memory://`` URLs by their roots. They live as long as the storage process."""

_REPOSITORIES: dict[tuple[str, RemoteOptions], HubRepository] = {}
"""The repositories of ``hf://`` URLs. They keep their commits as long as the storage process lives."""


Purpose = Literal["read", "upload", "whole"]
"""The requests for which a client is used: most of them; uploads, whose parts obstore repeats one by one; and those for
an object of any size as a whole, which may take any time."""

MAX_TRANSFER = timedelta(days=7)
"""The time limit of obstore's client for objects of any size."""


def make_backend(root: str, options: RemoteOptions, purpose: Purpose) -> Backend:
    """Return a new client for a store. It reads credentials from the options, the environment and profiles.

    Args:
        root: The root of the store, as :func:`~shardio.storage.remote.urls.split_url` returns it.
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
    if scheme == hub_names.SCHEME:
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
    # It has those methods of obstore's stores that read; shardio does not write to repositories.
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
    """Return boto3's credentials where object_store itself finds none: in profiles, and in ``~/.aws``.

    The option ``profile`` is removed from ``config``.

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
    """Return whether the user relies on AWS's configuration files rather than on the environment."""
    if os.environ.get("AWS_ACCESS_KEY_ID"):
        return False
    files = (
        os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"),
        os.environ.get("AWS_CONFIG_FILE", "~/.aws/config"),
    )
    return any(os.path.exists(os.path.expanduser(file)) for file in files)  # noqa: PTH110, PTH111  # They are strings.
