"""What obstore's errors mean: whether to try again, and what to tell the user.

obstore raises most errors as GenericError. What happened is in the text: the server's status and answer, or the cause
of a broken connection. The text may also hold signed URLs, which must not reach messages and logs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal["transient", "expired", "missing", "denied", "beyond_end", "permanent"]

_STATUS = re.compile(r"(?:status code|error response): (?P<code>\d{3})(?P<reason>[^:<\n]*)")
_XML = re.compile(r"<(?P<tag>Code|Message)>(?P<text>[^<]*)</(?P=tag)>")
_INNERMOST = re.compile(r'(?:message|error|description): "(?P<text>[^"]+)"')
_QUERY = re.compile(r"\?\S*")
_EXPIRED = re.compile(r"Expired|RequestTimeTooSkewed|TokenRefreshRequired|invalid_token", re.IGNORECASE)
_TRANSIENT_CODES = {"RequestTimeout", "SlowDown", "InternalError", "ServiceUnavailable", "Throttling"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFailure:
    """Why a request failed.

    Attributes:
        kind: ``transient`` failures may end by themselves. ``expired`` ones may end with new credentials.
        cause: The cause, for messages. It contains no credentials.
        reached: Whether a server answered.
    """

    kind: Kind
    cause: str
    reached: bool = True


class FailedRequestError(Exception):
    """A request failed, and it is known what that means.

    Args:
        failure: Why it failed.
    """

    def __init__(self, failure: RequestFailure) -> None:
        super().__init__(failure.cause)
        self.failure = failure


def explain(error: Exception) -> RequestFailure:
    """Return what an error of obstore means."""
    from obstore import exceptions

    if isinstance(error, FailedRequestError):
        return error.failure
    text, _, source = str(error).partition("\n\nDebug source:")
    status = _STATUS.search(text)
    answer = {found["tag"]: found["text"] for found in _XML.finditer(text)}
    cause = _describe(text, source, status, answer)
    if isinstance(error, FileNotFoundError):
        return RequestFailure(kind="missing", cause="it does not exist")
    if _EXPIRED.search(answer.get("Code", "")) or isinstance(error, exceptions.UnauthenticatedError):
        return RequestFailure(kind="expired", cause=cause)
    if isinstance(error, exceptions.PermissionDeniedError):
        return RequestFailure(kind="denied", cause=cause)
    if status is not None:
        code = int(status["code"])
        if code in (401, 403):  # obstore has no error of its own for listings.
            return RequestFailure(kind="denied", cause=cause)
        if code == 416:
            return RequestFailure(kind="beyond_end", cause=cause)
        is_transient = code >= 500 or code in (408, 412, 425, 429) or answer.get("Code") in _TRANSIENT_CODES
        return RequestFailure(kind="transient" if is_transient else "permanent", cause=cause)
    if "builder error" in text:
        cause = "the endpoint is not a URL, or uses http:// without the option allow_http (AWS_ALLOW_HTTP=true)"
        return RequestFailure(kind="permanent", cause=cause)
    if "Range started" in text or "Range(" in source or "StartTooLarge" in source:
        return RequestFailure(kind="beyond_end", cause=cause)
    # A connection that failed or broke, or an answer that makes no sense.
    return RequestFailure(kind="transient", cause=cause, reached="Connect" not in source)


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
