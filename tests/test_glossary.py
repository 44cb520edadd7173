"""Names and texts use the words of shardio/README.md."""

from __future__ import annotations

import ast
import re
from pathlib import Path

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
"""Words that no name in the package contains, with their replacements."""

FOREIGN = {"cudaHostRegister", "cudaHostUnregister", "get_host_cpu_features", "get_host_cpu_name", "tell"}
"""Names of other libraries."""

PHRASES = ("gone on with", "begun anew", "whoever", "somebody", "nobody", "likewise", "at the most", "of which")
"""Phrases that no text in the package may contain."""

FIRST_WORDS = ("Have ", "Let ", "Say ")
"""Words with which no docstring may start."""


def parts_of(name: str) -> set[str]:
    """Return the words of a name, in lower case and in the singular."""
    found = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    return {part.lower() for part in found} | {part.lower().removesuffix("s") for part in found}


def read(path: Path) -> tuple[set[str], list[str], list[str]]:
    """Return the names, the texts and the docstrings of a file."""
    names, texts, docstrings = {path.stem}, list[str](), list[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                names.add(name)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Constant(value=str(text)):
                texts.append(re.sub(r"\s+", " ", text))
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            docstrings.append(ast.get_docstring(node) or "")
    return names, texts, docstrings


def test_names_and_texts_keep_to_the_glossary() -> None:
    offenders = list[str]()
    for path in PATHS:
        names, texts, docstrings = read(path)
        found = {f"{name}: say {WORDS[part]}" for name in names - FOREIGN for part in parts_of(name) & set(WORDS)}
        found |= {f"says {phrase!r}" for text in texts for phrase in PHRASES if phrase in text.lower()}
        found |= {f"begins with {text.splitlines()[0]!r}" for text in docstrings if text.startswith(FIRST_WORDS)}
        offenders += [f"{path.relative_to(PACKAGE)}: {each}" for each in sorted(found)]
    assert not offenders, "\n".join(offenders)


def test_the_glossary_of_the_readme_names_each_word_once() -> None:
    section = (PACKAGE / "README.md").read_text().partition("## Words")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| ([^|]+) \|", section, re.MULTILINE)
    words = [word.strip(" `") for cell in cells for word in cell.split(",")][1:]
    assert {"row", "rng key", "executor", "fork server", "buffer pool"} <= set(words)
    assert len(words) == len(set(words))
