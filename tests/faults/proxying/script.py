"""What a fault proxy does to the requests that pass through it, and what it has seen."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

OWN_ANSWERS = ("status_500", "status_503", "status_429", "expired_token", "changed_object")
"""The proxy answers itself; the server never sees the request."""

BEFORE_RESPONSE = ("reset_before", "stall_before")
"""The server has answered before a reset, so a write has happened. It never sees a request that stalls."""

OTHER_RANGES = ("too_long", "wrong_range")
"""The server answers another request. It must serve objects without a signature, or ignore signatures."""

IN_BODY = ("reset_in_body", "stall_in_body", "truncated", "wrong_length", "corrupt")
"""The body differs from what the server sent, in length or in one bit."""

KINDS = (*OWN_ANSWERS, *BEFORE_RESPONSE, *OTHER_RANGES, *IN_BODY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """How a fault proxy behaves. The same seed and order of requests give the same faults.

    Args:
        seed: The seed of all random choices.
        latency_s: The least time from the end of a request's head to the first byte of the response, in seconds. What
            the server itself takes is part of it.
        jitter_s: Up to how much longer that time is, in seconds.
        connection_bytes_per_s: The bandwidth of each connection, in either direction, or None for no limit.
        total_bytes_per_s: The bandwidth of all connections together, or None for no limit.
        faults: The probability of each kind of fault per request, in total at most 1. A fault that a response does
            not allow, such as ``truncated`` for a body of less than 2 bytes, does not happen.
        path_pattern: A regular expression. Only requests whose path, with its query, contains a match have faults.
        methods: Only requests with these methods have faults.
        max_faults: The number of faults after which no more happen, or None for no limit.
    """

    seed: int = 0
    latency_s: float = 0.0
    jitter_s: float = 0.0
    connection_bytes_per_s: float | None = None
    total_bytes_per_s: float | None = None
    faults: Mapping[str, float] = field(default_factory=dict)
    path_pattern: str = ""
    methods: tuple[str, ...] = ("GET",)
    max_faults: int | None = None

    def __post_init__(self) -> None:
        unknown = set(self.faults) - set(KINDS)
        if unknown:
            raise ValueError(f"faults has unknown kinds {sorted(unknown)}: use some of {', '.join(KINDS)}")
        if min(self.faults.values(), default=0) < 0 or sum(self.faults.values()) > 1 + 1e-9:
            raise ValueError(f"the probabilities in faults must be at least 0, and in total at most 1: {self.faults}")
        for name in ("connection_bytes_per_s", "total_bytes_per_s"):
            rate = getattr(self, name)
            if rate is not None and rate <= 0:
                raise ValueError(f"{name} must be positive, or None for no limit; got {rate}")
        re.compile(self.path_pattern)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRequest:
    """A request that a fault proxy has received.

    Args:
        method: The HTTP method.
        path: The path with the query, as the client sent it.
        range: The Range header, or None.
        status: The status that the client received, or None if it has received none.
        num_bytes: The bytes of the response's body that the proxy has sent to the client.
        fault: The kind of the fault, or None.
    """

    method: str
    path: str
    range: str | None
    status: int | None
    num_bytes: int
    fault: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What has passed through a fault proxy.

    Args:
        num_requests: The requests received.
        num_connections: The connections accepted.
        num_bytes: The bytes of bodies that it has sent to clients.
        num_faults: The faults of each kind that has happened.
        cpu_s: The processor time that the proxy has used since its process started, in seconds.
    """

    num_requests: int
    num_connections: int
    num_bytes: int
    num_faults: Mapping[str, int]
    cpu_s: float
