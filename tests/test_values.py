"""Settings with types from other libraries become Python types, and every defect in a JSON text causes a ValueError."""

from __future__ import annotations

import io
import json
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pytest
import torch

from shardio import DataLoader, DevicePrefetcher, EpochSampler, ImageFolder, ShardDataset, ShardMapDataset
from shardio.images import Orientation
from shardio.order import Remainder
from shardio.reading import Verify
from shardio.train import TrainConfig
from shardio.values import check_choice, check_integer, parse_json
from tests.raising import assert_raises

THREE: list[Any] = [3, np.int64(3), np.uint8(3), np.array(3), torch.tensor(3)]
NO_INTEGERS: list[Any] = [3.0, np.float64(3), torch.tensor(3.0), "3", None, True, np.True_, torch.tensor(True), [3]]


def test_integers_of_all_libraries_become_pythons_and_anything_else_is_an_error() -> None:
    checked = [check_integer("seed", value, at_least=3, below=4) for value in THREE]
    assert (checked, {type(value) for value in checked}) == ([3] * len(THREE), {int})
    for value in NO_INTEGERS:
        assert_raises(TypeError, "seed must be an integer, got", check_integer, "seed", value)


@pytest.mark.parametrize("choices", [Orientation, Remainder, Verify, Literal["one"]], ids=str)
def test_a_choice_becomes_pythons_string_and_anything_else_is_an_error(choices: Any) -> None:
    words = get_args(choices)
    checked = [check_choice("setting", np.str_(word), choices) for word in words]
    assert (checked, {type(word) for word in checked}) == (list(words), {str})
    listed = ", ".join(map(repr, words))
    for other in ("another", "", None, 1):
        with pytest.raises(ValueError, match=f"setting must be one of {listed}, got {other!r}"):
            check_choice("setting", other, choices)


def make_sharded(packed: Path, settings: dict[str, Any], **options: Any) -> DataLoader:
    return DataLoader(ShardDataset(packed, fields="key", shuffle=True, **settings), **options)


def make_sampled(packed: Path, settings: dict[str, Any], **options: Any) -> DataLoader:
    dataset = ShardMapDataset(packed, fields="key")
    return DataLoader(dataset, sampler=EpochSampler(dataset, **settings), **options)


def with_numpys_integers(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: with_numpys_integers(inner) for name, inner in value.items()}
    return np.int64(value) if type(value) is int else value


@pytest.mark.parametrize("make", [make_sharded, make_sampled])
def test_a_run_with_numpys_integers_is_saved_and_resumed(make: Any, packed: Path) -> None:
    plain: dict[str, Any] = {"seed": 7, "window": 6, "strata": 2, "rank": 1, "world_size": 2}
    whole = [key for batch in make(packed, plain, batch_size=4) for key in batch]
    loader = make(packed, with_numpys_integers(plain), batch_size=np.int64(4), num_workers=np.int32(0))
    loader.set_epoch(np.int64(0))
    before = [key for batch in islice(loader, 2) for key in batch]
    state, file = loader.state_dict(), io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    for saved in (json.loads(json.dumps(state)), torch.load(file, weights_only=True), with_numpys_integers(state)):
        resumed = make(packed, plain, batch_size=4)
        resumed.load_state_dict(saved)
        json.dumps(resumed.state_dict())
        assert before + [key for batch in resumed for key in batch] == whole


@pytest.mark.parametrize("wrong", [1.5, True, "2"])
def test_each_integer_setting_accepts_only_integers(packed: Path, images: Path, wrong: Any) -> None:
    dataset, sharded = ShardMapDataset(packed), ShardDataset(packed)
    calls: list[tuple[Any, list[Any], str]] = [
        (ShardDataset, [packed], "seed batch_size window strata"),
        (partial(ShardDataset, world_size=4), [packed], "rank"),
        (partial(EpochSampler, rank=0), [dataset], "world_size"),
        (EpochSampler, [dataset], "seed"),
        (ImageFolder, [images], "max_pixels"),
        (sharded.set_epoch, [], "epoch"),
        (dataset.set_epoch, [], "epoch"),
        (partial(dataset.set_epoch, 1), [], "seed"),
        (DataLoader, [sharded], "num_workers prefetch_factor batch_size"),
        (DevicePrefetcher, [[], "cpu"], "depth"),
        (TrainConfig, [], "accumulate seed"),
    ]
    for call, arguments, names in calls:
        for name in names.split():
            options: dict[str, Any] = {"shuffle": True} if call is ShardDataset else {}
            message = f"{name} must be an integer, got {wrong!r}"
            assert_raises(TypeError, message, call, *arguments, **{**options, name: wrong})
    config = TrainConfig(epochs=np.int64(3), seed=np.int64(5), accumulate=np.int32(2))  # type: ignore[arg-type]
    assert [type(value) for value in (config.epochs, config.seed, config.accumulate)] == [int] * 3


MANY = b"".join(b'"%d":0,' % i for i in range(100_000))
WRONG = [b"[" * 100_000 + b"]" * 100_000, b'{"a":' * 100_000 + b"1" + b"}" * 100_000]
WRONG += [b'{"a": 1, "b": {"c": 2, "c": 2}}', b"{" + MANY + b'"99999":0}', b'{"a": NaN}', b"[-Infinity]"]
WRONG += ["{}".encode("utf-16"), '{"ä": 1}'.encode("latin-1"), b'{"a": ', b""]
"""Texts that nest too deeply, repeat a name, contain non-JSON numbers, are not in UTF-8, are truncated or are empty."""


@pytest.mark.parametrize("content", WRONG, ids=range(len(WRONG)))
def test_every_defect_of_a_text_is_a_value_error(content: bytes) -> None:
    assert_raises(ValueError, r".", parse_json, content)


@pytest.mark.parametrize("value", [None, {"ä": [1, -2.5, True, {}], "b": "é"}, [[[]]], 2**64])
def test_a_written_value_is_read(value: object) -> None:
    text = json.dumps(value, ensure_ascii=False)
    assert parse_json(text) == parse_json(text.encode()) == parse_json(b"\xef\xbb\xbf" + text.encode()) == value
