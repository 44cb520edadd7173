"""ShardDataset and ShardMapDataset yield what was packed, decoded as requested."""

from __future__ import annotations

import copy
import io
import json
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import shardio
from shardio import ImageFolder, SampleError, ShardDataset, ShardMapDataset
from shardio.order.split import POSITIONS_AT_ONCE
from shardio.transforms import Compose, RandomHorizontalFlip, RandomResizedCrop
from tests.raising import assert_raises
from tests.sources import encode
from tests.tars import write_tar


@pytest.fixture
def rich(tmp_path: Path) -> Path:
    """A flat dataset of four samples with fields of many kinds."""
    src = tmp_path / "src"
    src.mkdir()
    for number in range(4):
        array = io.BytesIO()
        np.save(array, np.arange(number + 1))
        (src / f"{number}.png").write_bytes(encode(number, suffix="png"))
        (src / f"{number}.json").write_text(json.dumps({"number": number}))
        (src / f"{number}.txt").write_text(f"größe {number}")
        (src / f"{number}.cls").write_text(str(number * 10))
        (src / f"{number}.npy").write_bytes(array.getvalue())
        (src / f"{number}.pkl").write_bytes(pickle.dumps({"n": number}))
    shardio.pack(src, tmp_path / "out", shuffle_seed=None)
    return tmp_path / "out"


def test_fields_are_decoded_by_their_names(rich: Path) -> None:
    fields = ("image", "label", "key", "json", "txt", "cls", "npy", "pkl", "png")
    samples = list(ShardDataset(rich, fields=fields))
    assert len(samples) == 4
    for number, (image, label, key, obj, text, cls, array, pkl, png) in enumerate(samples):
        pixels = np.asarray(Image.open(io.BytesIO(encode(number, suffix="png"))))
        assert torch.equal(image, torch.from_numpy(pixels.copy()).permute(2, 0, 1))
        assert (label, key, obj, text, cls) == (number * 10, str(number), {"number": number}, f"größe {number}", label)
        assert array.tolist() == list(range(number + 1))
        assert pkl == pickle.dumps({"n": number})
        assert torch.equal(png, image)
    assert list(ShardDataset(rich, fields="key")) == ["0", "1", "2", "3"]
    assert list(ShardDataset(rich, fields=("key",))) == [("0",), ("1",), ("2",), ("3",)]
    assert next(iter(ShardDataset(rich, fields="pkl", trusted=True))) == {"n": 0}


def test_an_array_of_objects_is_refused_unless_trusted_and_so_are_labels_that_are_no_numbers(tmp_path: Path) -> None:
    array = io.BytesIO()
    np.save(array, np.array([{"a": 1}], dtype=object))
    write_tar(tmp_path / "a.tar", [("x.jpg", encode(0)), ("x.npy", array.getvalue()), ("x.cls", b"cat")])
    with pytest.raises(SampleError, match=r"field 'npy' of sample x .*trusted=True"):
        list(ShardDataset(tmp_path / "a.tar", fields="npy"))
    assert next(iter(ShardDataset(tmp_path / "a.tar", fields="npy", trusted=True)))[0] == {"a": 1}
    assert_raises(SampleError, "ASCII digits, got b'cat'", lambda: next(iter(ShardDataset(tmp_path / "a.tar"))))


@pytest.mark.parametrize(
    "transform", [RandomResizedCrop(16), Compose([Compose([]), Compose([RandomHorizontalFlip(), id])])]
)
def test_shardios_transforms_refuse_pil_images_and_others_get_them(packed: Path, images: Path, transform: Any) -> None:
    for make in (ShardDataset, ShardMapDataset, ImageFolder):
        with pytest.raises(TypeError, match=r"Random.* takes uint8 .* decode='pil' gives it .* use decode='array'"):
            make(images if make is ImageFolder else packed, decode="pil", transform=transform)
    taken = Compose([np.asarray, RandomResizedCrop(16)])
    assert ShardMapDataset(packed, fields="image", decode="pil", transform=taken)[0].shape == (3, 16, 16)
    assert next(iter(ShardDataset(packed, fields="image", decode="pil", transform=lambda i: i.size))) == (48, 32)


@pytest.mark.parametrize("first", ["cls", "jpg"])
@pytest.mark.parametrize("fields", [("image",), ("image", "label"), ("label", "key", "image")])
def test_errors_name_the_location_of_the_damage(tmp_path: Path, first: str, fields: tuple[str, ...]) -> None:
    contents = {"jpg": encode(0)[:-100], "cls": b"0", "json": b"{"}
    names = sorted(contents, key=lambda name: name != first)
    write_tar(tmp_path / "a.tar", [(f"x.{name}", contents[name]) for name in names])
    with tarfile.open(tmp_path / "a.tar") as tar:
        offsets = {member.name: member.offset_data for member in tar}
    for some, field in ((fields, "jpg"), (("key", "cls", "json"), "json")):
        where = f"sample x in {tmp_path / 'a.tar'} at byte {offsets[f'x.{field}']}"
        with pytest.raises(SampleError, match=f"{where} cannot be decoded") as error_info:
            ShardMapDataset(tmp_path / "a.tar", fields=some)[0]
        assert error_info.value.where == where.removeprefix("sample x in ")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"fields": ()}, ValueError),
        ({"decode": "tensor"}, ValueError),
        ({"orientation": "up"}, ValueError),
        ({"transform": 3}, TypeError),
        ({"remainder": "repeat"}, ValueError),
        ({"batch_size": 0}, ValueError),
        ({"rank": 0}, ValueError),
        ({"rank": 2, "world_size": 2}, ValueError),
    ],
)
def test_values_out_of_range_are_refused(packed: Path, options: dict[str, Any], error: type[Exception]) -> None:
    assert_raises(error, None, ShardDataset, packed, **options)


def test_drop_without_a_batch_size_is_refused(packed: Path) -> None:
    for use in (iter, len):
        with pytest.raises(ValueError, match=r"remainder='drop' leaves .* set ShardDataset\(batch_size="):
            use(ShardDataset(packed, remainder="drop"))


def test_map_style_holds_the_same_samples_in_manifest_order(packed: Path) -> None:
    by_number = ShardMapDataset(packed, fields=("key", "label", "image"))
    in_sequence = list(ShardDataset(packed, fields=("key", "label", "image")))
    assert len(by_number) == len(in_sequence) == 21
    for number, (key, label, image) in enumerate(in_sequence):
        for index in (number, number - 21):
            assert by_number[index][:2] == (key, label)
            assert torch.equal(by_number[index][2], image)
    assert_raises(IndexError, None, lambda: by_number[21])
    keys = ShardMapDataset(packed, fields="key")
    assert keys.__getitems__([20, 3, 3, -1]) == [keys[20], keys[3], keys[3], keys[-1]]


def test_crops_depend_on_seed_epoch_and_sample_alone(packed: Path) -> None:
    transform = Compose([RandomResizedCrop(16), RandomHorizontalFlip()])

    def crops(seed: int, epoch: int, **order: Any) -> dict[str, torch.Tensor]:
        dataset = ShardDataset(packed, fields=("key", "image"), transform=transform, seed=seed, **order)
        dataset.set_epoch(epoch)
        return dict(dataset)

    first = crops(0, 0)
    for again in (crops(0, 0, shuffle=True), crops(0, 0, batch_size=4)):
        assert all(torch.equal(first[key], again[key]) for key in first)
    for other in (crops(0, 1), crops(1, 0)):
        assert sum(torch.equal(first[key], other[key]) for key in first) < 3
    by_number = ShardMapDataset(packed, fields=("key", "image"), transform=transform)
    by_number.set_epoch(0, seed=0)
    assert all(torch.equal(first[key], image) for key, image in (by_number[i] for i in range(21)))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_set_epoch_changes_the_order_and_a_copy_keeps_its_own(packed: Path, copied: Callable[[Any], Any]) -> None:
    dataset = ShardDataset(packed, fields="key", shuffle=True)
    first = list(dataset)
    assert list(dataset) == first
    other = copied(dataset)
    other.set_epoch(1)
    assert list(other) != first
    assert (sorted(other), list(dataset)) == (sorted(first), first)
    assert list(pickle.loads(pickle.dumps(dataset))) == first


def test_the_error_of_an_empty_or_missing_field_names_sample_and_shard(packed: Path, tmp_path: Path) -> None:
    members = [("x.jpg", b""), ("x.cls", b"0"), ("y.cls", b"0"), ("z.jpg", encode(0)), ("z.json", b"{}")]
    write_tar(tmp_path / "a.tar", members)
    for index, fields, words in (
        (0, "image", r"the image of sample x in .*a\.tar.* cannot be decoded: it is empty"),
        (1, "image", r"sample y in .*a\.tar.* has no image"),
        (0, "json", r"sample x in .*a\.tar.* has no field 'json'"),
    ):
        with pytest.raises(SampleError, match=words):
            ShardMapDataset(tmp_path / "a.tar", fields=fields)[index]
    choices = r"no sample of .* has the field 'json': choose fields=\.\.\. from image, key, label, cls, jpg"
    assert_raises(ValueError, choices, ShardDataset, packed, fields=("image", "json"))
    write_tar(tmp_path / "b.tar", [("x.jpg", encode(0))])
    assert_raises(ValueError, "has the field 'label'", ShardMapDataset, tmp_path / "b.tar")


@pytest.mark.slow
def test_more_samples_than_the_order_computes_at_once_are_delivered_once_each(tmp_path: Path) -> None:
    numbers = [f"{number:05d}" for number in range(2 * POSITIONS_AT_ONCE + 100)]
    write_tar(tmp_path / "many.tar", [(f"{number}.cls", b"1") for number in numbers])
    options: list[dict[str, Any]] = [{}, {"remainder": "mask", "batch_size": 64}]
    for each in options:
        dataset = ShardDataset(tmp_path / "many.tar", fields=("key",), shuffle=True, **each)
        assert sorted(sample[0] for sample in dataset) == numbers
