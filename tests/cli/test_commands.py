"""The commands that exist are those that README names, and each one's help has an example of it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

import shardio
from shardio.cli.main import app

COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]  # It is a group.
README = Path(shardio.__file__).parents[1] / "README.md"


def test_the_readme_names_every_command() -> None:
    rows = re.findall(r"^\| (`shardio .+?) \|", README.read_text(), re.MULTILINE)
    named = {command for row in rows for command in re.findall(r"`shardio ([\w-]+)", row)}
    assert named == set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_an_example_with_arguments_that_it_accepts(name: str) -> None:
    command = COMMANDS[name]
    last_paragraph = " ".join(command.help.strip().split("\n\n")[-1].split())
    words = shlex.split(last_paragraph)
    assert words[:3] == ["Example:", "shardio", name]
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("-")} <= known


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - {"tile", "untile"}))
def test_each_command_that_takes_urls_takes_settings_of_their_stores(name: str) -> None:
    known = {option for parameter in COMMANDS[name].params for option in parameter.opts}
    assert "--storage-option" in known
    caching = {"--cache", "--cache-size", "--cache-shared"}
    assert known & caching == (caching if name in ("bench", "check", "train") else set())
