"""Problems of a dataset: what verification finds."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

ProblemKind = Literal[
    "manifest", "unfinished", "unlisted", "missing", "index", "stale", "header", "content", "digest", "unindexed",
    "duplicate", "undecodable",
]  # fmt: skip
"""What can be wrong, in the order of a report:

=============  =======================================================================================
manifest       the manifest is unreadable, or does not match an index
unfinished     a pack into the directory was interrupted
unlisted       a tar in the directory is not in the manifest
missing        a tar or its index does not exist, or cannot be read
index          an index is damaged
stale          an index does not match the size, version or layout of its tar
header         the tar header of a member is damaged or has another name or size, or data follows the end
content        a content does not have the hash in the index, or is outside the tar
digest         a tar does not have the digest in its index
unindexed      a member is not in the index
duplicate      a key occurs twice
undecodable    an image cannot be decoded
=============  =======================================================================================
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A problem of a dataset.

    Attributes:
        kind: What is wrong.
        where: The path of the tar, index, manifest or directory.
        message: The problem in words, with what was found and what was expected.
        key: The key of the sample; None if the problem is not about one sample.
        field: The name of the field; None if the problem is not about one field.
        offset: Where the problem is in the tar, in bytes; None if that is unknown.
    """

    kind: ProblemKind
    where: str
    message: str
    key: str | None = None
    field: str | None = None
    offset: int | None = None

    def __str__(self) -> str:
        at = "" if self.offset is None else f" at byte {self.offset}"
        parts = [f"field {self.field!r}"] if self.field is not None else []
        parts += [f"sample {self.key}"] if self.key is not None else []
        return f"{self.where}{at}: {' of '.join(parts)}{': ' if parts else ''}{self.message}"

    def dump(self) -> dict[str, Any]:
        """Return the problem as values for JSON."""
        return asdict(self)
