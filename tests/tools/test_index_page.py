"""The page and metadata for a package index.

No text may lead readers to confuse shardio with another project of the same name.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from shardio import __file__ as package_file, __version__
from tools.index_page import make_index_page

ROOT = Path(package_file).parents[1]
TEXTS = [
    path
    for pattern in ("*.md", "*.toml", "*.txt", "[!.]*/**/*.py", "[!.]*/**/*.md", "[!.]*/**/*.sh")
    for path in ROOT.glob(pattern)
    if path != Path(__file__)
]
"""All text files in the repository."""

WRONG_INSTALL = re.compile(
    r"\b(?:install|add)\s+(?:-\S+\s+(?:\S+\.txt\s+)?)*['\"]?shardio(?![-\w./])|(?<![/\w])shardio\[[a-z]"
)
"""A command that installs shardio by its name, with or without an extra. Paths are allowed."""


def read_project() -> dict[str, Any]:
    if sys.version_info < (3, 11):
        pytest.skip("tomllib needs Python 3.11")
    import tomllib

    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project


def test_no_text_recommends_installing_the_other_project() -> None:
    wrong = ["pip install shardio", "pip install -U\n'shardio[tile]'", "uv add shardio", "needs 'shardio[parquet]'"]
    assert all(map(WRONG_INSTALL.search, [*wrong, "pip install -c constraints.txt shardio"]))
    right = ["pip install shardio-loader", "pip install '/path/to/shardio[tile]'", "pip install ./shardio"]
    assert not any(map(WRONG_INSTALL.search, [*right, "pip install numpy, which shardio uses"]))
    assert len(TEXTS) > 300
    found = [(path.relative_to(ROOT), match[0]) for path in TEXTS for match in WRONG_INSTALL.finditer(path.read_text())]
    assert found == []


def test_the_metadata_name_the_distribution_the_command_and_the_supported_versions_and_systems() -> None:
    project = read_project()
    assert project["name"] == "shardio-loader"
    assert project["scripts"] == {"shardio": "shardio.cli.main:main"}
    assert not [url for url in project.get("urls", {}).values() if "example" in url]
    versions = {line.rpartition(" ")[2] for line in project["classifiers"] if re.search(r"Python :: 3\.\d+$", line)}
    assert versions == {f"3.{minor}" for minor in range(10, 15)}
    assert project["requires-python"] == ">=3.10"
    assert {"Operating System :: POSIX :: Linux", "Operating System :: MacOS"} <= set(project["classifiers"])
    # PEP 639: the license is an expression, so there must not be a license classifier.
    assert (project["license"], [line for line in project["classifiers"] if "License" in line]) == ("Apache-2.0", [])
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {__version__}\n" in citation
    assert f"\n  - name: {project['authors'][0]['name']}\n" in citation


def test_the_index_page_has_no_broken_links() -> None:
    find_links = re.compile(r"\]\(([^)\s]+)\)").findall
    readme = (ROOT / "README.md").read_text()
    relative = [target for target in find_links(readme) if not target.startswith(("https:", "#"))]
    assert relative
    plain = make_index_page(readme, None)
    assert all(target.startswith(("https:", "#")) for target in find_links(plain))
    assert "CHANGELOG.md" in plain  # The link's text is kept.
    linked = make_index_page(readme, "https://host/project/")
    targets = find_links(linked)
    assert [target.removeprefix("https://host/project/") for target in targets] == find_links(readme)
    assert all((ROOT / target.partition("#")[0]).exists() for target in relative)
