"""``--help``, ``shardio help``, shell completion, and the form that all errors share."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from email.message import Message
from itertools import chain
from pathlib import Path

import pytest

import shardio
from shardio.cli.main import MODULES, PANELS, load_command
from tests.cli.commands import ERROR, error_of, run, run_main, usage_error
from tests.packing.packs import write_files

MAX_OPTIONS = 10
"""A command with more options than this has panels."""


def sections_of(text: str) -> dict[str, list[str]]:
    """Return the first word of each row of a help text, grouped by section heading."""
    found = re.findall(r"^(\S.*):\n((?:  .*\n)+)", text + "\n", re.MULTILINE)
    return {heading: re.findall(r"^  (\S+)", rows, re.MULTILINE) for heading, rows in found}


@pytest.mark.parametrize("name", MODULES)
def test_each_command_has_plain_help_with_panels_and_an_example(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = run(name, "--help").stdout
    assert text == run(name, "-h").stdout == run("help", name).stdout
    assert re.match(rf"Usage: shardio {name} \[OPTIONS\]( [A-Z]+(\.\.\.)?| \[[A-Z]+\])+\n", text)
    assert text.replace("\n", "").isprintable()
    assert not re.search(r"[\u2500-\u257f\u2011{}]", text)  # Box characters, non-breaking hyphens and braces.
    assert max(map(len, text.splitlines())) <= 80
    assert not re.search(r"\w-$", text, re.MULTILINE)

    command, sections = load_command(name), sections_of(text)
    shown = {heading: [word.strip(",") for word in words if word[0] == "-"] for heading, words in sections.items()}
    options = [each for each in command.params if each.param_type_name == "option"]
    firsts = [next(word for words in shown.values() for word in words if word in each.opts) for each in options]
    assert sorted(chain.from_iterable(shown.values())) == sorted([*firsts, "-h"]), "each option is in one panel"
    assert list(sections)[-1] == "Options"
    assert len(options) <= MAX_OPTIONS or set(shown["Options"]) <= {"--json", "-h"}

    (line,) = re.findall(r"^  Example: shardio (.*)$", text, re.MULTILINE)
    first, *words = shlex.split(line.partition(" > ")[0])
    assert first == name
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path, {word: b"" for word in words if Path(word).suffix in (".jpg", ".yaml")})  # They must exist.
    assert command.make_context(name, words).args == []
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("-")} <= known
    assert ("--storage-option" in known) == (name not in ("tile", "untile", "help"))
    caching = {"--cache", "--cache-size", "--cache-shared"}
    assert known & caching == (caching if name in ("bench", "check", "train") else set())


def test_without_a_command_the_commands_are_listed() -> None:
    assert run("--version").stdout == run("-V").stdout == f"shardio {shardio.__version__}\n"
    text = run("--help").stdout
    assert text == run("-h").stdout == run("help").stdout
    done = run(code=2)
    assert (done.stdout, done.stderr) == ("", text)
    assert max(map(len, text.splitlines())) <= 80
    sections = sections_of(text)
    assert list(sections) == [*PANELS, "Options"]
    assert {panel: list(commands) for panel, commands in PANELS.items()}.items() <= sections.items()
    for commands in PANELS.values():
        for name, (_, summary) in commands.items():
            assert re.search(rf"^  {name} +{re.escape(summary)}$", text, re.MULTILINE)


@pytest.fixture
def urls(monkeypatch: pytest.MonkeyPatch) -> Message:
    """Give the installed package empty metadata, to which a test may add URLs."""
    found = Message()
    monkeypatch.setattr("importlib.metadata.metadata", {"shardio-loader": found}.__getitem__)
    return found


def test_help_ends_with_a_link_to_the_documentation(urls: Message) -> None:
    for label, url in (("Repository", "https://a.example/code"), ("Documentation", "https://a.example/docs")):
        urls["Project-URL"] = f"{label}, {url}"
        for words in ([], ["pack"], ["ls"]):
            assert run(*words, "--help").stdout.endswith(f"\n\nDocumentation: {url}\n")


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        ("pakc", "no such command 'pakc'", "did you mean 'pack'?"),
        ("help pakc", "no such command 'pakc'", "did you mean 'pack'?"),
        ("xyz", "no such command 'xyz'", "see shardio --help"),
        ("--verison", "no such option: --verison", "did you mean '--version'?"),
        ("ls a --lmit 1", "no such option: --lmit", "did you mean '--limit'?"),
        ("ls a --xyz", "no such option: --xyz", "see shardio ls --help"),
        ("ls", "missing argument 'SOURCE'", "see shardio ls --help"),
        ("ls a b", "got unexpected extra argument(s) (b)", "see shardio ls --help"),
        ("ls a --limit x", "invalid value for '--limit': ", "see shardio ls --help"),
        ("export-index a", "missing option '--format'. Choose from: wids, dali, ", "see shardio export-index --help"),
        ("pack a b --jpeg tiles", "invalid value for '--jpeg': 'tiles' is not one of ", "see shardio pack --help"),
        ("pack a b --max-side 9", "--max-side (max_side) applies only with ", "see shardio pack --help"),
        ("tile nothing.jpg", "invalid value for 'FILES': ", "see shardio tile --help"),
        ("dups a --between", "invalid value for --between: needs several sources", "see shardio dups --help"),
    ],
)
def test_usage_errors_have_one_form(words: str, error: str, hint: str) -> None:
    found = usage_error(*words.split())
    assert found.startswith(f"error: {error}")
    assert found.endswith(f"\nhint: {hint}\n")


def test_failures_have_one_form(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notes.txt").write_text("no image")
    (tmp_path / "empty").mkdir()
    sources = [tmp_path / "nothing", tmp_path / "notes.txt", tmp_path / "empty", "s4://bucket/train"]
    out = tmp_path / "out"
    for command in ("pack", "append", "merge", "index", "repair", "info", "ls", "order", "tile", "dups", "mix"):
        for source in sources:
            words = {"pack": [source, out], "append": [source, source], "merge": [out, source]}.get(command, [source])
            done = run_main(command, *words)
            assert done.code in (1, 2), (command, source)
            assert done.stdout == ""
            assert "Traceback" not in done.stderr
            errors = [line for line in done.stderr.splitlines(keepends=True) if not line.startswith("nothing was ")]
            assert ERROR.fullmatch("".join(errors)), done.stderr
    assert "hint: shardio ls lists the keys\n" in error_of("cat", packed, "no-key")
    monkeypatch.chdir(packed)  # An empty argument does not mean the working directory.
    error = "error: an argument is empty\nhint: check that the shell variables in the command are set\n"
    assert run_main("info", "") == (2, "", error)


def test_an_internal_error_has_a_traceback_and_asks_for_a_report(
    monkeypatch: pytest.MonkeyPatch, urls: Message
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("the cause")

    monkeypatch.setattr("shardio.cli.look.open_shards", fail)
    urls["Project-URL"] = "Issues, https://a.example/issues"
    done = run_main("ls", "a")
    assert (done.code, done.stdout) == (1, "")
    first, *_, cause, error, hint = done.stderr.splitlines()
    assert (first, cause) == ("Traceback (most recent call last):", "KeyError: 'the cause'")
    assert error == "error: shardio failed unexpectedly"
    assert hint == "hint: report the traceback at https://a.example/issues"


@pytest.mark.parametrize(("no_color", "is_styled"), [("", True), ("1", False)])
def test_only_a_terminal_shows_styles(no_color: str, is_styled: bool) -> None:
    """``script`` runs a command in a terminal."""
    if (script := shutil.which("script")) is None or sys.platform != "linux":
        pytest.skip("there is no script command from util-linux")
    command = shlex.join([sys.executable, "-m", "shardio", "ls", "--nothing"])
    environment = {**os.environ, "NO_COLOR": no_color, "TERM": "xterm"}
    command_on_a_terminal = [script, "-qec", command, "/dev/null"]
    done = subprocess.run(command_on_a_terminal, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert ("\x1b[" in done.stdout) == is_styled
    assert ERROR.fullmatch(re.sub(r"\x1b\[[\d;]*m|\r", "", done.stdout))


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_commands_options_and_values(tmp_path: Path) -> None:
    program = tmp_path / "shardio"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m shardio "$@"\n')
    program.chmod(0o755)
    lines = {
        "shardio pa": "pack",
        "shardio help unt": "untile",
        "shardio pack --max-s": "--max-shard-samples --max-shard-size --max-side",
        "shardio pack a b --jpeg re": "reencode",
        "shardio ls a": "",
    }
    script = """
        eval "$(shardio --show-completion)"
        for line in "$@"; do
            COMP_WORDS=($line) COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
            $(complete -p shardio | sed 's/.*-F \\([^ ]*\\) .*/\\1/') shardio
            echo "${COMPREPLY[*]}"
        done
    """
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", "-c", script, "bash", *lines]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert [" ".join(sorted(line.split())) for line in done.stdout.splitlines()] == list(lines.values())
