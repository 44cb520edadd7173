"""``shardio.pack`` of an iterable: samples that a program makes."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import shardio
from shardio import PackError
from shardio.images.jpeg import has_tiles
from tests.files import read_files
from tests.sources import encode
from tests.tars import by_key, read_with_webdataset

SAMPLES = [{"__key__": f"x/{i:02d}", "jpg": encode(i), "cls": "bee" if i % 2 else "ant"} for i in range(20)]


class OnlyIndexed:
    """A map-style dataset: it has a length and an index, and raises no IndexError."""

    def __len__(self) -> int:
        return len(SAMPLES)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return SAMPLES[number % len(SAMPLES)]


@pytest.mark.parametrize("make", [lambda: SAMPLES, lambda: iter(SAMPLES), OnlyIndexed], ids=["list", "iterator", "map"])
def test_an_iterable_is_packed_in_its_order_as_a_writer_would(make: Any, tmp_path: Path) -> None:
    manifest = shardio.pack(make(), tmp_path / "out", max_shard_samples=7, classes=["ant", "bee"])
    with shardio.ShardWriter(tmp_path / "written", max_shard_samples=7, classes=["ant", "bee"]) as writer:
        for sample in SAMPLES:
            writer.write(sample)
    tars = {name: content for name, content in read_files(tmp_path / "out").items() if name.startswith("shard-")}
    written = read_files(tmp_path / "written")
    assert tars == {name: content for name, content in written.items() if name.startswith("shard-")}
    assert manifest.classes == ("ant", "bee")
    found = [key for key, _ in read_with_webdataset(*sorted((tmp_path / "out").glob("*.tar")))]
    assert found == [sample["__key__"] for sample in SAMPLES]


def test_samples_without_keys_are_numbered_and_images_are_checked_and_tiled(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    photo = np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8)
    samples: list[dict[str, Any]] = [
        {"jpg": photo, "json": {"made": True}},
        {"jpg": encode(1)[:300], "cls": 1},
        {"jpg": encode(2, width=96, height=64), "cls": 2},
    ]
    with caplog.at_level(logging.WARNING):
        manifest = shardio.pack(samples, tmp_path / "out", jpeg="tile")
    assert manifest.pack["num_tiled"] == 2
    found = by_key(*(tmp_path / "out").glob("*.tar"))
    assert set(found) == {"00000000", "00000002"}
    assert all(has_tiles(sample["jpg"]) for sample in found.values())
    (line,) = (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()
    assert json.loads(line)["key"] == "00000001"
    assert json.loads(line)["file"] == "00000001.jpg"
    assert "00000001.jpg cannot be decoded" in caplog.text


def test_images_are_converted(tmp_path: Path) -> None:
    file = io.BytesIO()
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(file, "GIF")
    shardio.pack([{"image": file.getvalue()}], tmp_path / "out", convert_to="png")
    (sample,) = by_key(*(tmp_path / "out").glob("*.tar")).values()
    assert Image.open(io.BytesIO(sample["png"])).size == (8, 8)


def test_an_interrupted_call_starts_again(tmp_path: Path) -> None:
    def interrupted() -> Iterator[dict[str, Any]]:
        yield from SAMPLES[:15]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shardio.pack(interrupted(), tmp_path / "out", max_shard_samples=4, classes=["ant", "bee"])
    with pytest.raises((shardio.FormatError, FileNotFoundError)):
        shardio.open(tmp_path / "out")
    shardio.pack(SAMPLES, tmp_path / "out", max_shard_samples=4, classes=["ant", "bee"])
    shardio.pack(SAMPLES, tmp_path / "whole", max_shard_samples=4, classes=["ant", "bee"])
    assert read_files(tmp_path / "out") == read_files(tmp_path / "whole")
    with pytest.raises(PackError, match="is not empty"):
        shardio.pack(SAMPLES, tmp_path / "out", classes=["ant", "bee"])


def test_wrong_samples_and_options_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(TypeError, match="sample 1 is a tuple: an iterable must yield mappings such as"):
        shardio.pack([SAMPLES[0] | {"cls": 0}, (1, 2)], out)  # type: ignore[list-item]
    with pytest.raises(PackError, match="the key 'x/00' of sample 1 is also the key of sample 0"):
        shardio.pack([SAMPLES[0] | {"cls": 0}] * 2, out)
    with pytest.raises(PackError, match=r"no sample can be packed: 00000000\.jpg is not an image"):
        shardio.pack([{"jpg": b"none"}], out)
    with pytest.raises(PackError, match="no samples were written"):
        shardio.pack([], out)
    options = {"layout": "flat", "num_workers": 2, "on_changed": "skip", "labels": "x.csv", "key_column": "key"}
    for name, value in options.items():
        with pytest.raises(ValueError, match=f"{name} does not apply to an iterable of samples: omit it"):
            shardio.pack(SAMPLES, out, **{name: value})  # type: ignore[arg-type]
    assert not out.exists()
