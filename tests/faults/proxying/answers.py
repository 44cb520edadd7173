"""The answers that a fault proxy gives itself, in the words of S3, and the requests that it changes."""

from __future__ import annotations

import re

from tests.faults.proxying.streams import find_header, set_header

ERRORS = {
    "status_500": ("500 Internal Server Error", "InternalError", "We encountered an internal error. Please try again."),
    "status_503": ("503 Slow Down", "SlowDown", "Please reduce your request rate."),
    "status_429": ("429 Too Many Requests", "TooManyRequests", "Please reduce your request rate."),
    "expired_token": ("403 Forbidden", "ExpiredToken", "The provided token has expired."),
    "changed_object": (
        "412 Precondition Failed",
        "PreconditionFailed",
        "At least one of the preconditions you specified did not hold.",
    ),
    "no_server": ("502 Bad Gateway", "BadGateway", "The fault proxy could not connect to the server."),
}
"""For each kind of fault, the status line, and the code and the message of S3's body."""

CLOSED_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


def error_answer(kind: str) -> tuple[int, bytes, bytes]:
    """Return the status, the head and the body of an error."""
    line, code, message = ERRORS[kind]
    body = (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f"<Error><Code>{code}</Code><Message>{message}</Message><RequestId>0</RequestId></Error>"
    ).encode()
    wait = "Retry-After: 1\r\n" if kind == "status_429" else ""
    head = f"HTTP/1.1 {line}\r\nContent-Type: application/xml\r\n{wait}Content-Length: {len(body)}\r\n\r\n"
    return int(line[:3]), head.encode(), body


def ask_other_range(head: bytes, kind: str, place: float) -> tuple[bytes, int, int | None] | None:
    """Return another request for the same object, if the kind of fault allows one.

    Args:
        head: The head of the client's request.
        kind: ``too_long`` or ``wrong_range``.
        place: A random number in [0, 1), which chooses the other range.

    Returns:
        The other head, the status that its response must have, and the length of its body, or None for any length.
    """
    asked = CLOSED_RANGE.fullmatch(find_header(head, "range") or "")
    if asked is None:
        return None
    if kind == "too_long":
        return set_header(head, "Range", None), 200, None
    start, last = int(asked[1]), int(asked[2])
    length = last + 1 - start
    other = int(place * start) if start else 1
    return set_header(head, "Range", f"bytes={other}-{other + length - 1}"), 206, length
