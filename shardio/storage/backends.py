"""Create obstore clients, and classify their errors: whether to retry, and what to tell the user.

obstore raises most errors as GenericError. The error's text has the details: the server's status and response, or the
cause of a broken connection. The text may also hold signed URLs, which must not reach messages or logs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from shardio.errors import LocationError
from shardio.storage.local import bound_requests
from shardio.storage.locations import RemoteOptions

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Backend

CONNECT_S = 5.0
"""The maximum time in seconds to connect to a server, unless ``timeout_s`` is shorter."""

TIMEOUTS_PER_REQUEST = 6
"""The maximum time of a request that makes progress, in multiples of ``timeout_s``. A server that sends only a byte now
and then must not block a request forever."""

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
"""The stores of ``memory://`` URLs, by root; they exist until the storage process ends."""

Purpose = Literal["read", "upload", "whole"]
"""The purpose of a client. ``upload``: uploads, whose parts obstore retries one by one. ``whole``: requests for whole
objects of any size, which may take any length of time. ``read``: all other requests."""

MAX_TRANSFER = timedelta(days=7)
"""The time limit of obstore's client for objects of any size."""


def make_backend(root: str, options: RemoteOptions, purpose: Purpose) -> Backend:
    """Return a new client for a store. The client reads credentials from the options, the environment and profiles.

    Args:
        root: The root of the store, as :func:`~shardio.storage.locations.split_url` returns it.
        options: The settings.
        purpose: The purpose of the client.

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
    try:
        match scheme:
            case "s3":
                return store.S3Store(authority, config=own, **_find_profile(own), **common)
            case "gs":
                return store.GCSStore(authority, config=own, **common)
            case "az":
                return store.AzureStore(authority, config=own, **common)
            case "hf":
                from shardio.storage.hub import make_store

                return make_store(root, options, own, common)
            case _:
                refuse_options(root, own)
                return store.HTTPStore.from_url(root, **common)
    except exceptions.BaseError as error:
        message = str(error).partition("\n")[0]
        raise LocationError(f"cannot use {root}: {message}. Check the storage options and the environment") from None


def refuse_options(root: str, names: Collection[str]) -> None:
    """Raise LocationError if there are options that a store does not support."""
    if names:
        raise LocationError(f"unknown options for {root}: {', '.join(sorted(names))}")


def _client_options(config: Mapping[str, str], scheme: str, options: RemoteOptions, purpose: Purpose) -> dict[str, Any]:
    timeout_s = options.timeout_s
    found: dict[str, Any] = {
        "connect_timeout": timedelta(seconds=min(CONNECT_S, timeout_s)),
        "read_timeout": timedelta(seconds=timeout_s),
        "timeout": MAX_TRANSFER if purpose == "whole" else timedelta(seconds=TIMEOUTS_PER_REQUEST * timeout_s),
        "pool_idle_timeout": timedelta(seconds=15),  # Most servers wait longer before they close idle connections.
        "pool_max_idle_per_host": str(bound_requests(options.max_requests)),
    }
    for name in CLIENT_OPTIONS & config.keys():
        found[name] = config[name]
        if name in _FLAGS:
            if config[name].lower() not in ("true", "false"):
                raise LocationError(f"the storage option {name} must be true or false, got {config[name]!r}")
            found[name] = config[name].lower() == "true"
    # Options in `found` replace those that object_store reads from the environment.
    if scheme == "http" or os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true"):
        found.setdefault("allow_http", True)
    return found


def _find_profile(config: dict[str, str]) -> dict[str, Any]:
    """Return boto3's credentials from profiles and ``~/.aws``, which object_store does not read.

    The option ``profile`` is removed from ``config``.
    """
    profile = config.pop("profile", None)
    explicit = {"access_key_id", "aws_access_key_id", "skip_signature", "aws_skip_signature"} & config.keys()
    if explicit or (profile is None and not _has_aws_files()):
        return {}
    try:
        import boto3  # type: ignore[import-untyped]  # boto3 has no types.
        import botocore.exceptions  # type: ignore[import-untyped]  # botocore has no types.
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
    places = {"AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials", "AWS_CONFIG_FILE": "~/.aws/config"}
    paths = (os.environ.get(name, default) for name, default in places.items())
    return any(os.path.exists(os.path.expanduser(path)) for path in paths)  # noqa: PTH110, PTH111  # Paths are strings.


Kind = Literal[
    "transient", "unclear", "unknown_size", "expired", "missing", "denied", "beyond_end", "no_ranges", "permanent"
]

_STATUS = re.compile(r"(?:status code|error response): (?P<code>\d{3})(?P<reason>[^:<\n]*)")
_XML = re.compile(r"<(?P<tag>Code|Message)>(?P<text>[^<]*)</(?P=tag)>")
_INNERMOST = re.compile(r'(?:message|error|description): "(?P<text>[^"]+)"')
_QUERY = re.compile(r"\?\S*")
_EXPIRED = re.compile(r"Expired|RequestTimeTooSkewed|TokenRefreshRequired|invalid_token", re.IGNORECASE)
_TRANSIENT_CODES = {"RequestTimeout", "SlowDown", "InternalError", "ServiceUnavailable", "Throttling"}

_TRANSIENT_STATUSES = {408, 412, 425, 429}
"""HTTP statuses of refusals that, like most server errors, may be temporary."""

_LASTING_STATUSES = {501, 505, 511}
"""HTTP statuses of permanent server errors: not implemented, HTTP version not supported, network login required."""

_UNANSWERED = ("Connect", "IncompleteMessage")
"""Words in an error's debug source that show that no server has answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFailure:
    """The cause of a failed request.

    Attributes:
        kind: ``transient`` failures may go away on their own. ``expired`` failures may go away with new credentials.
            ``unclear`` responses do not match the request: they were damaged in transit, or the server always responds
            in this way. ``unknown_size`` means that the server did not state the object's size. A cache in front of the
            server may state the size later, when it has the whole object. ``no_ranges`` means that the server does not
            send parts of this object.
        cause: The cause, for messages, without credentials.
        reached: Whether a server answered.
        remedy: The remedy to show to the user; None for the default remedy of the kind.
    """

    kind: Kind
    cause: str
    reached: bool = True
    remedy: str | None = None


class _Sign(NamedTuple):
    """The meaning of an error whose debug source contains a pattern.

    The pattern's group replaces ``{}`` in the cause.
    """

    pattern: str
    kind: Kind
    cause: str
    remedy: str | None = None


_SIGNS = (
    _Sign(
        r"RangeNotSupported|NotPartial|ParseContentRange|NoContentRange",
        "no_ranges",
        "the server does not support HTTP range requests (Range and Content-Range)",
        "Use a server that does, such as nginx, or download the files",
    ),
    _Sign(r"IncompleteBody", "transient", "the response ended prematurely"),
    _Sign(r"UnexpectedRange", "unclear", "the server sent a different range from the one requested"),
    _Sign(
        r"MissingContentLength",
        "unknown_size",
        "the server does not say how long the file is (no Content-Length)",
        "Configure it to send files unchanged: servers that compress or generate responses cannot state their length",
    ),
    _Sign(
        r"InvalidLastModified \{\s*last_modified: \"(.*?)\"",
        "permanent",
        "the server sent an invalid date (Last-Modified: {})",
        "Correct the server's settings",
    ),
    _Sign(
        r"TooManyRedirects",
        "permanent",
        "the server redirects in a loop",
        "Check the URL, and whether the server requires a login",
    ),
    _Sign(
        r"BareRedirect",
        "permanent",
        "the server's redirect has no target (no Location)",
        "Check the URL and, for a bucket, the region in the storage options",
    ),
    _Sign(
        r"InvalidCertificate\(\s*(?:Other\(\s*OtherError\(\s*)?(\w+)",
        "permanent",
        "the server's certificate is not valid ({})",
        "Check the URL and the server's certificate. To trust a different certificate authority, set "
        "the storage option root_certificate to its certificate",
    ),
    _Sign(
        r"InvalidMessage\(\s*InvalidContentType",
        "permanent",
        "the server does not use TLS on this port",
        "Check the port, or use http://",
    ),
    _Sign(
        r"(?:AlertReceived|PeerIncompatible|PeerMisbehaved)\(\s*(\w+)",
        "permanent",
        "the TLS connection to the server failed ({})",
        "Check the port and the server's TLS versions: shardio requires TLS 1.2 or later",
    ),
    _Sign(
        r"kind: Builder|BadScheme",
        "permanent",
        "the endpoint or a redirect is not a URL, or uses http:// without the option allow_http (AWS_ALLOW_HTTP=true)",
    ),
    _Sign(r"hyper::Error\(\s*Parse\(\s*(\w+)", "unclear", "the response is not valid HTTP (invalid {})"),
    _Sign(
        r"InvalidPath \{.*?path: (\".*?\"),\n",
        "permanent",
        "the store lists an object whose name cannot be requested: {}",
        "Names must not have empty parts, '.', '..' or control characters. Rename or remove the object, or keep it in "
        "another folder",
    ),
)
"""The meanings of errors, in order of precedence: the first pattern that matches determines the meaning."""


class FailedRequestError(Exception):
    """A request failed, and the cause is known.

    Args:
        failure: The cause.
    """

    def __init__(self, failure: RequestFailure) -> None:
        super().__init__(failure.cause)
        self.failure = failure


def explain(error: Exception) -> RequestFailure:
    """Return the cause of an obstore error."""
    from obstore import exceptions

    if isinstance(error, FailedRequestError):
        return error.failure
    text, _, source = str(error).partition("\n\nDebug source:")
    status = _STATUS.search(text)
    answer = {found["tag"]: found["text"] for found in _XML.finditer(text)}
    cause = _describe(text, source, status, answer)
    code = int(status["code"]) if status is not None else None
    if code == 410 or (code in (None, 404) and isinstance(error, FileNotFoundError)):
        return RequestFailure(kind="missing", cause="it does not exist")
    if _EXPIRED.search(answer.get("Code", "")) or isinstance(error, exceptions.UnauthenticatedError):
        return RequestFailure(kind="expired", cause=cause)
    # For listings, obstore raises no specific error class.
    if code in (401, 403) or isinstance(error, exceptions.PermissionDeniedError):
        return RequestFailure(kind="denied", cause=cause)
    if code == 416:
        return RequestFailure(kind="beyond_end", cause=cause)
    if code is not None:
        is_transient = (code >= 500 and code not in _LASTING_STATUSES) or code in _TRANSIENT_STATUSES
        is_transient |= answer.get("Code") in _TRANSIENT_CODES
        return RequestFailure(kind="transient" if is_transient else "permanent", cause=cause)
    for sign in _SIGNS:
        if found := re.search(sign.pattern, source, re.DOTALL):
            detail = redact(found[1]) if found.re.groups else ""
            return RequestFailure(kind=sign.kind, cause=sign.cause.format(detail), remedy=sign.remedy)
    if "Range started" in text or "Range(" in source or "StartTooLarge" in source:
        return RequestFailure(kind="beyond_end", cause=cause)
    # The connection failed or was interrupted.
    return RequestFailure(kind="transient", cause=cause, reached=not any(word in source for word in _UNANSWERED))


def is_refused_head(error: Exception) -> bool:
    """Return whether a server refused to describe an object. Requesting the object's content may give a better error.

    The response to a HEAD request has no body. Some servers do not support HEAD requests, or do not state the object's
    size.
    """
    text, _, source = str(error).partition("\n\nDebug source:")
    if (status := _STATUS.search(text)) is None:
        return "MissingContentLength" in source
    code = int(status["code"])
    return code == 501 or (400 <= code < 500 and code not in (404, 410, *_TRANSIENT_STATUSES))


def _describe(text: str, source: str, status: re.Match[str] | None, answer: dict[str, str]) -> str:
    if status is not None:
        reason = f"the server answered {status['code']}{status['reason'].rstrip()}"
        details = ": ".join(answer[tag] for tag in ("Code", "Message") if answer.get(tag))
        return f"{reason} ({details})" if details else reason
    found = [match["text"] for match in _INNERMOST.finditer(source)]
    if found:
        return redact(found[-1])
    last = text.splitlines()[0].rpartition(" - ")[2] if text else type(text).__name__
    kinds = [kind for kind in ("TimedOut", "Timeout", "Connect", "IncompleteMessage") if kind in source]
    return redact(last) + (f" ({kinds[0]})" if kinds else "")


def redact(text: str) -> str:
    """Remove the queries of URLs, which may hold signatures and tokens."""
    return _QUERY.sub("?…", text)
