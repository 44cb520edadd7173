"""Lists in the documentation name everything that the code's tables contain, and nothing else."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from contextlib import suppress
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import pytest

import shardio
from shardio.cli.main import load_command
from shardio.datasets.map_datasets import FolderSettings
from shardio.datasets.ordered import SamplerSettings, ShardDatasetSettings
from shardio.datasets.samples import FieldedSettings
from shardio.datasets.stream_dataset import StreamSettings
from shardio.decoding.codecs import DECODERS
from shardio.images import IMAGE_FORMATS
from shardio.order import POLICIES
from shardio.packing.sources.source import SOURCES

ROOT = Path(shardio.__file__).parent.parent
PROMISES = (ROOT / "docs" / "promises.md").read_text()


def literals(kind: Any) -> set[str]:
    """Return the strings that a type allows."""
    if get_origin(kind) is Literal:
        return {value for value in get_args(kind) if isinstance(value, str)}
    return set[str]().union(*map(literals, get_args(kind))) if get_origin(kind) in (Union, UnionType) else set()


def paragraph_of(name: str, doc: str) -> str:
    """Return the description of a parameter or an attribute in a docstring."""
    found = re.search(rf"^    {name}: (.*\n(?:        .*\n)*)", f"{inspect.cleandoc(doc)}\n", re.MULTILINE)
    return found[1] if found else ""


def described_settings() -> list[tuple[str, set[str], str]]:
    """Return each public setting that is described, with the strings that it allows and its description."""
    found = list[tuple[str, set[str], str]]()
    owners: list[Any] = [FolderSettings, ShardDatasetSettings, SamplerSettings, StreamSettings]
    owners += [getattr(shardio, name) for name in shardio.__all__]
    for each in dict.fromkeys(part for owner in owners for part in getattr(owner, "__mro__", [owner])):
        names = vars(sys.modules.get(getattr(each, "__module__", ""), shardio))
        annotations = getattr(each, "__annotations__", {}) | getattr(each.__init__, "__annotations__", {})
        for name, annotation in annotations.items():
            if text := paragraph_of(name, each.__doc__ or ""):
                # Some types are imported only for type checkers; none of them is a Literal.
                with suppress(NameError):
                    kind = eval(annotation, dict(names)) if isinstance(annotation, str) else annotation
                    found.append((f"{each.__name__}: {name}", literals(kind), text))
    return found


def test_a_docstring_that_names_some_values_of_a_setting_names_all() -> None:
    complete = list[str]()
    for place, choices, text in described_settings():
        if named := choices & set(re.findall(r"``\"?([\w-]+)\"?``", text)):
            assert named == choices, place
            complete.append(place)
    assert {"pack: source_kind", "EpochSettings: remainder"} <= set(complete)


def test_the_promises_explain_every_remainder_policy_and_name_files_that_exist() -> None:
    rows = PROMISES.partition("| `remainder=` | effect |")[2]
    assert set(re.findall(r"^\| `(\w+)`", rows, re.MULTILINE)) == set(POLICIES)
    tested = re.findall(r"^\| (?!promise |---|`).+ \| (.+) \|$", PROMISES, re.MULTILINE)
    assert len(tested) >= 15
    for row in tested:
        paths = re.findall(r"`((?:tests|tools)/[^`]+)`", row)
        assert any(path.startswith("tests/") for path in paths), row
        assert [path for path in paths if not (ROOT / path).is_file()] == []


@pytest.mark.parametrize(
    "text",
    [(ROOT / "docs" / "loading.md").read_text(), paragraph_of("fields", FieldedSettings.__doc__ or "")],
    ids=["page", "fields"],
)
def test_lists_of_decoded_fields_name_every_codec(text: str) -> None:
    lists = re.findall(r"(?:`(?:json|jpg)`+)(?:,\s+`+\w+`+)+\s+and\s+`+\w+`+", text)
    named = set(re.findall(r"\w+", " ".join(lists))) - {"and"}
    codecs = {**DECODERS, **IMAGE_FORMATS}
    assert named <= codecs.keys()
    assert {codecs[name] for name in named} == set(codecs.values())


def test_lists_of_other_tools_datasets_name_every_kind() -> None:
    command: Any = load_command("pack")
    table = (ROOT / "docs" / "packing.md").read_text().partition("| you have | command |")[2].partition("\n\n")[0]
    (argument,) = (each.help for each in command.params if each.name == "source")
    words = [kind.replace("table", "csv") for kind in SOURCES if kind != "files"]
    for text in (argument, paragraph_of("src", shardio.pack.__doc__ or ""), table):
        assert [word for word in words if word not in text.lower()] == [], text


TROUBLES = (ROOT / "docs" / "troubleshooting.md").read_text()


def test_the_page_on_troubles_names_every_public_error_and_quotes_messages_of_the_package() -> None:
    values: list[Any] = [getattr(shardio, name) for name in shardio.__all__]
    errors = [each for each in values if isinstance(each, type) and issubclass(each, shardio.ShardioError)]
    assert len(errors) == 13
    assert [each.__name__ for each in errors if f"`{each.__name__}`" not in TROUBLES] == []
    quoted = re.findall(r"\*\*`([^`]+)`\*\*", re.sub(r"\s+", " ", TROUBLES))
    assert len(quoted) > 40
    messages = ""
    for path in (ROOT / "shardio").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values]
                messages += "".join(parts).replace("\n", " ") + "\n"
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                messages += node.value.replace("\n", " ") + "\n"
    patterns = {text: ".*".join(map(re.escape, text.split("…"))) for text in quoted}
    assert [text for text, pattern in patterns.items() if not re.search(pattern, messages)] == []
