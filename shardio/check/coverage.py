"""Coverage: which samples were delivered, how often, where and by whom."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass

from shardio.errors import CoverageError

SHOWN = 10
"""How many keys of each kind a report names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """Where a sample arrived: on which rank, from which of its workers, in which of its batches.

    ``worker`` is None where that is not known.
    """

    rank: int
    worker: int | None
    batch: int

    def __str__(self) -> str:
        worker = "" if self.worker is None else f" worker {self.worker}"
        return f"rank {self.rank}{worker} batch {self.batch}"


class Coverage:
    """Collects the deliveries of one epoch, over all ranks."""

    def __init__(self) -> None:
        self._deliveries: defaultdict[Hashable, list[Delivery]] = defaultdict(list)

    def add(self, keys: Iterable[Hashable], delivery: Delivery) -> None:
        """Count the samples of one batch."""
        for key in keys:
            self._deliveries[key].append(delivery)

    def report(self, expected: Collection[Hashable], *, num_repeats: int = 0, num_missing: int = 0) -> CoverageReport:
        """Compare what was delivered with what should have been.

        Args:
            expected: The keys of the epoch, each once.
            num_repeats: How many deliveries too many the remainder policy asks for (``pad``), spread evenly.
            num_missing: How many samples it leaves out (``drop``).
        """
        wanted = set(expected)
        return CoverageReport(
            num_expected=len(wanted),
            repeated={key: found for key, found in self._deliveries.items() if len(found) > 1},
            missing=[key for key in expected if key not in self._deliveries],
            unexpected={key: found for key, found in self._deliveries.items() if key not in wanted},
            by_source=Counter(
                (delivery.rank, delivery.worker) for found in self._deliveries.values() for delivery in found
            ),
            allowed_repeats=num_repeats,
            allowed_missing=num_missing,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CoverageReport:
    """What an epoch delivered, against what it should have.

    Attributes:
        num_expected: The samples of the epoch.
        repeated: The deliveries of each sample that came more than once.
        missing: The samples that never came.
        unexpected: The deliveries of each sample that nobody expected.
        by_source: How many samples came from each (rank, worker).
        allowed_repeats: How many deliveries too many the remainder policy asks for.
        allowed_missing: How many samples it leaves out.
    """

    num_expected: int
    repeated: dict[Hashable, list[Delivery]]
    missing: list[Hashable]
    unexpected: dict[Hashable, list[Delivery]]
    by_source: Counter[tuple[int, int | None]]
    allowed_repeats: int
    allowed_missing: int

    @property
    def num_repeats(self) -> int:
        """How many deliveries there were beyond the first of each sample."""
        return sum(len(found) - 1 for found in self.repeated.values())

    @property
    def num_once(self) -> int:
        """How many of the expected samples came exactly once."""
        repeated = sum(key not in self.unexpected for key in self.repeated)
        return self.num_expected - len(self.missing) - repeated

    @property
    def sources(self) -> list[tuple[int, int | None, int]]:
        """How many samples each worker delivered: sorted (rank, worker, number)."""
        rows = ((rank, worker, number) for (rank, worker), number in self.by_source.items())
        return sorted(rows, key=lambda row: (row[0], -1 if row[1] is None else row[1]))

    @property
    def is_right(self) -> bool:
        """Whether every sample came exactly once, but for what the remainder policy says; and some came at all."""
        # Padding goes round the epoch, so that no sample comes more than once more often than another.
        most = 1 + -(-self.allowed_repeats // max(self.num_expected, 1))
        return (
            bool(self.by_source or not self.num_expected)
            and not self.unexpected
            and len(self.missing) == self.allowed_missing
            and self.num_repeats == self.allowed_repeats
            and all(len(found) <= most for found in self.repeated.values())
        )

    def __str__(self) -> str:
        lines = [
            f"{self.num_expected} samples: {self.num_once} came once, {len(self.repeated)} more than once"
            f"{_allowed(self.num_repeats, self.allowed_repeats, 'repeats')}, {len(self.missing)} never"
            f"{_allowed(len(self.missing), self.allowed_missing, 'left out')}, {len(self.unexpected)} unexpected"
        ]
        if self.is_right:
            return lines[0]
        for title, deliveries in ("repeated", self.repeated), ("unexpected", self.unexpected):
            for key, found in list(deliveries.items())[:SHOWN]:
                lines.append(f"  {title}: {key!s} came {len(found)} times: {', '.join(map(str, found))}")
        lines += [f"  missing: {key!s}" for key in self.missing[:SHOWN]]
        return "\n".join(lines)

    def raise_if_wrong(self) -> None:
        """Raise a CoverageError with this report unless the coverage is right."""
        if not self.is_right:
            raise CoverageError(str(self))


def _allowed(number: int, allowed: int, what: str) -> str:
    return f" ({number} {what}, {allowed} by the remainder policy)" if allowed else ""
