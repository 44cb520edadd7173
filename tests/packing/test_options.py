"""Each option of a pack is on the command line. Packs and appends depend on each option that decides the output."""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import numpy as np
import pytest

import shardio
from shardio.cli.main import load_command
from shardio.packing import PackOptions, PackResult, pack_source, rewriting
from shardio.packing.pack_call import OPTIONS_OF_SHARDS, deciding_options, kinds_of_options
from shardio.packing.sources.source import OPTIONS_OF_DOCUMENTS
from tests.packing.packs import write_files
from tests.sources import encode

OTHER_VALUES: dict[str, Any] = {
    "fields": ("jpg", "cls"),
    "classes": ("class-0",),
    "labels": Path("labels.csv"),
    "tokenizer": "encoding.py:encode",
    "storage_options": {"retries": 1},
}
"""Values other than the defaults. For options that this table lacks, ``other_value`` chooses the values."""

NEEDED: dict[str, dict[str, Any]] = {
    **{name: {"convert_to": "png"} for name in ("max_side", "min_side", "quality", "to_srgb")},
    "on_incomplete": {"layout": "pairs"},
}
"""Other options that an option needs."""


def write_sample(folder: Path, name: str, seed: int) -> None:
    """Write an image, or a document if an option applies only to documents."""
    if name in OPTIONS_OF_DOCUMENTS:
        folder.mkdir()
        (folder / f"{seed}.jsonl").write_text(json.dumps({"text": [seed]}))
    else:
        write_files(folder, {f"class-0/{seed}.jpg": encode(seed, width=8, height=8)})


def other_value(name: str) -> Any:
    if name in OTHER_VALUES:
        return OTHER_VALUES[name]
    kind, default = kinds_of_options()[name][0], getattr(PackOptions(), name)
    kinds = [each for each in (get_args(kind) if get_origin(kind) is not Literal else ()) if each is not type(None)]
    kind = kinds[0] if kinds else kind
    if get_origin(kind) is Literal:
        return next(value for value in get_args(kind) if value != default)
    return {bool: not default, int: 100, str: "text"}[kind]


def options_with(name: str) -> dict[str, Any]:
    return {**NEEDED.get(name, {}), name: other_value(name)}


def test_a_manifest_records_few_options_at_their_defaults() -> None:
    always = {"max_shard_size": 2**28, "max_shard_samples": None, "shuffle_seed": 0, "jpeg": "copy", "num_tiled": 3}
    assert PackOptions().describe(3) == always
    encoding = {"jpeg": "reencode", "max_side": None, "quality": 90}
    assert PackOptions(jpeg="reencode").describe(3) == always | encoding


@pytest.mark.parametrize("name", kinds_of_options())
def test_an_option_identifies_a_pack_if_it_decides_the_output(name: str) -> None:
    options = options_with(name)
    identity = PackOptions(**options).identify([])
    if type(options[name]) is int:
        assert PackOptions(**options | {name: np.int64(options[name])}).identify([]) == identity
    assert (identity != PackOptions(**NEEDED.get(name, {})).identify([])) == (name in deciding_options())


def test_each_option_is_in_the_signature_the_docstring_and_the_command() -> None:
    parameters = dict(list(inspect.signature(shardio.pack).parameters.items())[2:])
    options = {each.name: each.default for each in fields(PackOptions)}
    assert {name: each.default for name, each in parameters.items()} == options
    text = (inspect.getdoc(shardio.pack) or "").partition("Returns:")[0]
    assert re.findall(r"^    (\w+): ", text, re.MULTILINE) == ["src", "dst", *options]
    of_command: dict[str | None, Any] = {each.name: each for each in load_command("pack").params}
    assert all(of_command[name].opts[0].startswith("--") and of_command[name].help for name in options)


@pytest.mark.parametrize("is_resharded", [False, True])
@pytest.mark.parametrize("name", [name for name in deciding_options() if name != "tokenizer"])
def test_append_uses_the_deciding_options(
    tmp_path: Path, name: str, is_resharded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = list[PackOptions]()

    def pack_and_note(source: Path, out: Path, options: PackOptions, *others: Any) -> PackResult:
        used.append(options)
        return pack_source(source, out, options, *others)

    write_sample(tmp_path / "in", name, 0)
    write_sample(tmp_path / "more", name, 1)
    out = tmp_path / "out"
    shardio.pack(tmp_path / "in", out, num_workers=1, **options_with(name))
    if is_resharded:
        out = tmp_path / "resharded"
        shardio.reshard(tmp_path / "out", out)
    monkeypatch.setattr(rewriting, "pack_source", pack_and_note)
    shardio.append(out, tmp_path / "more", num_workers=1)
    assert [getattr(options, name) == other_value(name) for options in used] == [
        not is_resharded or name not in OPTIONS_OF_SHARDS
    ]
