"""The page that a package index shows: the README, in which relative links would lead nowhere."""

from __future__ import annotations

import re

_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)\s]+)\)")


def make_index_page(readme: str, source_url: str | None) -> str:
    """Return the README for an index.

    Args:
        readme: Markdown with links relative to the repository.
        source_url: Where the repository's files lie, with a slash at the end; None while it has no public address.
            Then links become their text, and pictures are left out.
    """

    def replace(match: re.Match[str]) -> str:
        mark, text, target = match.groups()
        if source_url is not None:
            return f"{mark}[{text}]({source_url}{target})"
        return "" if mark else text

    return _LINK.sub(replace, readme)
