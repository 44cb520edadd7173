"""Names and texts keep to the words of shardio/README.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardio

PACKAGE = Path(shardio.__file__).parent
PATHS = sorted(PACKAGE.rglob("*.py"))

WORDS = {
    "host": "worker process",
    "crew": "executor, or worker pool",
    "agenda": "queue",
    "maker": "builder",
    "feed": "executor",
    "ticket": "request",
    "lot": "rng key",
    "unsaid": "default",
    "ring": "pool",
    "told": "the fact",
    "tell": "the call",
    "nobody": "None, or unreadable",
    "whoever": "the class",
}
"""Words that no name in the package contains, and what to say instead."""

FOREIGN = {"cudaHostRegister", "cudaHostUnregister", "get_host_cpu_features", "get_host_cpu_name", "tell"}
"""Names of other libraries."""

PHRASES = (
    "gone on with",
    "begun anew",
    "whoever",
    "somebody",
    "nobody",
    "likewise",
    "at the most",
    "of which",
)
"""Phrases that no text of the package contains."""

FIRST_WORDS = ("Have ", "Let ", "Say ")
"""What no docstring starts with."""


def parts_of(name: str) -> set[str]:
    """Return the words of a name, in lower case and in the singular."""
    found = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    return {part.lower() for part in found} | {part.lower().removesuffix("s") for part in found}


def names_in(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Name():
                yield node.id
            case ast.Attribute():
                yield node.attr
            case ast.arg():
                yield node.arg
            case ast.FunctionDef() | ast.ClassDef():
                yield node.name


def texts_in(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"\s+", " ", node.value)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_names_keep_to_the_glossary(path: Path) -> None:
    names = {path.stem, *names_in(ast.parse(path.read_text()))} - FOREIGN
    found = {f"{name}: say {WORDS[part]}" for name in names for part in parts_of(name) & set(WORDS)}
    assert not found


@pytest.mark.parametrize("path", PATHS, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_texts_are_plain(path: Path) -> None:
    tree = ast.parse(path.read_text())
    found = {phrase for text in texts_in(tree) for phrase in PHRASES if phrase in text.lower()}
    assert not found
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docstrings = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, documented)]
    assert not [text.splitlines()[0] for text in docstrings if text.startswith(FIRST_WORDS)]


def test_the_glossary_of_the_readme_names_each_word_once() -> None:
    section = (PACKAGE / "README.md").read_text().partition("## Words")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| ([^|]+) \|", section, re.MULTILINE)
    words = [word.strip(" `") for cell in cells for word in cell.split(",")][1:]
    assert {"row", "rng key", "executor", "worker process", "buffer pool"} <= set(words)
    assert len(words) == len(set(words))
