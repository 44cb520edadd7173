"""Create the page for a package index: the README without relative links, which would be broken there."""

from __future__ import annotations

import re

_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)\s]+)\)")


def make_index_page(readme: str, source_url: str | None) -> str:
    """Return the README for a package index.

    Args:
        readme: Markdown with links relative to the repository.
        source_url: The URL of the repository's files, with a trailing slash. Pass None if the repository is not public,
            to turn links into plain text and leave out images.
    """

    def replace(match: re.Match[str]) -> str:
        mark, text, target = match.groups()
        if source_url is not None:
            return f"{mark}[{text}]({source_url}{target})"
        return "" if mark else text

    return _LINK.sub(replace, readme)
