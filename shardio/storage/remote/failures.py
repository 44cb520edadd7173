"""The meaning of obstore's errors: whether to try again, and what to tell the user.

obstore raises most errors as GenericError. Its text has the details: the server's status and answer, or the cause of a
broken connection. The text may also hold signed URLs, which must not reach messages and logs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

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
"""Statuses of refusals that may end by themselves, as errors of the server do."""

_LASTING_STATUSES = {501, 505, 511}
"""Statuses of lasting errors of the server: not implemented, HTTP version, log in to the network first."""

_UNANSWERED = ("Connect", "IncompleteMessage")
"""Words in the source of an error that mean that no server has answered."""

_CHECK_CERTIFICATE = (
    "Check the URL and the server's certificate. To trust another authority, set the storage option root_certificate "
    "to its certificate"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFailure:
    """The cause of a failed request.

    Attributes:
        kind: ``transient`` failures may end by themselves. ``expired`` ones may end with new credentials. ``unclear``
            answers do not fit the request: they were damaged on the way, or the server always answers so.
            ``unknown_size`` means that the server did not say how long the object is. A cache in front of the server
            may know this soon, when it has the whole object. ``no_ranges`` means that the server does not send parts
            of this object.
        cause: The cause, for messages. It contains no credentials.
        reached: Whether a server answered.
        remedy: The user's remedy; None for the remedy that the kind suggests.
    """

    kind: Kind
    cause: str
    reached: bool = True
    remedy: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sign:
    """The meaning of an error whose source contains a pattern. The pattern's group replaces ``{}`` in the cause."""

    pattern: str
    kind: Kind
    cause: str
    remedy: str | None = None


_SIGNS = (
    _Sign(
        pattern=r"RangeNotSupported|NotPartial|ParseContentRange|NoContentRange",
        kind="no_ranges",
        cause="the server does not send parts of files as HTTP defines (Range and Content-Range)",
        remedy="Use a server that does, such as nginx, or download the files",
    ),
    _Sign(pattern=r"IncompleteBody", kind="transient", cause="the answer broke off in the middle"),
    _Sign(pattern=r"UnexpectedRange", kind="unclear", cause="the server sent another range than was requested"),
    _Sign(
        pattern=r"MissingContentLength",
        kind="unknown_size",
        cause="the server does not say how long the file is (no Content-Length)",
        remedy="Let it send files as they are: servers that compress or generate answers do not know their length",
    ),
    _Sign(
        pattern=r"InvalidLastModified \{\s*last_modified: \"(.*?)\"",
        kind="permanent",
        cause="the server sent an invalid date (Last-Modified: {})",
        remedy="Correct the server's settings",
    ),
    _Sign(
        pattern=r"TooManyRedirects",
        kind="permanent",
        cause="the server redirects in a circle",
        remedy="Check the URL, and whether the server wants a login",
    ),
    _Sign(
        pattern=r"BareRedirect",
        kind="permanent",
        cause="the server redirects to nowhere (no Location)",
        remedy="Check the URL and, for a bucket, the region in the storage options",
    ),
    _Sign(
        pattern=r"InvalidCertificate\(\s*(?:Other\(\s*OtherError\(\s*)?(\w+)",
        kind="permanent",
        cause="the server's certificate is not valid ({})",
        remedy=_CHECK_CERTIFICATE,
    ),
    _Sign(
        pattern=r"InvalidMessage\(\s*InvalidContentType",
        kind="permanent",
        cause="the server does not use TLS at this port",
        remedy="Check the port, or use http://",
    ),
    _Sign(
        pattern=r"(?:AlertReceived|PeerIncompatible|PeerMisbehaved)\(\s*(\w+)",
        kind="permanent",
        cause="the server and shardio cannot agree on TLS ({})",
        remedy="Check the port and the server's versions of TLS: at least 1.2 is needed",
    ),
    _Sign(
        pattern=r"kind: Builder|BadScheme",
        kind="permanent",
        cause="the endpoint or a redirect is not a URL, or uses http:// without the option allow_http "
        "(AWS_ALLOW_HTTP=true)",
    ),
    _Sign(
        pattern=r"hyper::Error\(\s*Parse\(\s*(\w+)",
        kind="unclear",
        cause="the answer is not one of HTTP (invalid {})",
    ),
    _Sign(
        pattern=r"InvalidPath \{.*?path: (\".*?\"),\n",
        kind="permanent",
        cause="the store lists an object whose name cannot be requested: {}",
        remedy="Names have no empty parts, '.', '..' or control characters. Rename or remove the object, or keep it in "
        "another folder",
    ),
)
"""The signs in order: the first one found counts."""


class FailedRequestError(Exception):
    """A request failed for a known cause.

    Args:
        failure: The cause.
    """

    def __init__(self, failure: RequestFailure) -> None:
        super().__init__(failure.cause)
        self.failure = failure


def explain(error: Exception) -> RequestFailure:
    """Return the meaning of an obstore error."""
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
    # For listings, obstore raises no error class that tells this.
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
    # A connection that failed or broke.
    return RequestFailure(kind="transient", cause=cause, reached=not any(word in source for word in _UNANSWERED))


def is_refused_head(error: Exception) -> bool:
    """Return whether a server refused to describe an object, so that a request for its content may say more.

    The answer to a HEAD has no body. Some servers answer no HEAD at all, and some do not say how long the object is.
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
