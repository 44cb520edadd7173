"""A build hook for hatchling: the description of the package is the README without relative links."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class DescriptionHook(MetadataHookInterface):
    """Sets the dynamic field ``readme``."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Write the description into the metadata."""
        root = Path(self.root)
        make_index_page = runpy.run_path(str(root / "tools" / "index_page.py"))["make_index_page"]
        text = make_index_page((root / "README.md").read_text(encoding="utf-8"), self.config.get("source-url"))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
