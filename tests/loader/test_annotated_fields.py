"""Images, masks, boxes, points and numbers are fields that keep their types and are transformed together."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from shardio import DataLoader, DevicePrefetcher, EpochSampler, SampleError, ShardDataset, ShardMapDataset
from shardio.transforms import (
    BoundingBoxes,
    CenterCrop,
    ColorJitter,
    Compose,
    Labels,
    Mask,
    MultiCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    TrivialAugmentWide,
)
from tests.buffers import assert_same, save_npy
from tests.images.pictures import make_picture, save
from tests.images.stored_values import make_values, write_png, write_tiff
from tests.loader.programs import CALLING
from tests.sources import encode
from tests.tars import write_tar

ROOT = Path(__file__).parents[2]
FIELDS = ("left.jpg", "mask.png", "json", "right.jpg", "depth.png", "more.npy", "key")
KINDS: dict[str, Any] = {
    "left.jpg": "image",
    "right.jpg": "image",
    "mask.png": Mask(fill=255),
    "depth.png": "mask",
    "json.boxes": BoundingBoxes(min_size=1),
    "json.labels": Labels(boxes="json.boxes"),
    "json.points": "keypoints",
    "more.npy": "boxes",
}
ENTRIES = ("boxes", "labels", "points")
STEPS = [RandomResizedCrop(48, antialias=True), RandomHorizontalFlip(), TrivialAugmentWide(), ColorJitter(0.4)]
# The operations end the first crop plan, so shardio applies them before it plans the last flip.
AGAIN = [*STEPS, RandomHorizontalFlip(), CenterCrop(56)]
WAYS: dict[str, dict[str, Any]] = {"here": {}, "process": {"num_workers": 2}, "called": {"num_workers": 1, **CALLING}}


def make_mask(number: int, height: int, width: int) -> Image.Image:
    mask = Image.fromarray(np.random.default_rng(number).integers(0, 5, (height, width), np.uint8), "P")
    mask.putpalette(range(15))
    return mask


def make_sample(number: int) -> dict[str, bytes]:
    """Return a sample's files, which include two equal pictures and two equal lists of boxes."""
    height, width = 64 + number, 90 - 2 * number
    picture = save(make_picture(height, width, number), "JPEG")
    uniform = np.random.default_rng(number).uniform(0, 60, (number % 4, 2, 2))
    boxes, points = np.sort(uniform, axis=1).reshape(-1, 4), [[12.5, 30, 2], [50, 8, 1]]
    depth = Image.fromarray(np.random.default_rng(number).integers(0, 1 << 16, (height, width), np.uint16))
    annotation = {"boxes": boxes.tolist(), "labels": list(range(len(boxes))), "points": points, "id": number}
    return {
        "left.jpg": picture,
        "right.jpg": picture,
        "mask.png": save(make_mask(number, height, width), "PNG"),
        "depth.png": save(depth, "PNG"),
        "json": json.dumps(annotation).encode(),
        "more.npy": save_npy(boxes),
    }


def write_samples(path: Path, samples: list[dict[str, bytes]]) -> Path:
    members = [(f"{n:03d}.{field}", content) for n, sample in enumerate(samples) for field, content in sample.items()]
    write_tar(path, members)
    return path


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_samples(tmp_path_factory.mktemp("alike") / "a.tar", [make_sample(n) for n in range(10)])


def make_dataset(shards: Path, steps: list[Any] = STEPS) -> ShardMapDataset:
    return ShardMapDataset(shards, fields=FIELDS, transform=Compose(steps, fields=KINDS))


def as_tensor(value: Any) -> torch.Tensor:
    return value.as_subclass(torch.Tensor) if isinstance(value, torch.Tensor) else torch.from_numpy(np.array(value))


@pytest.mark.parametrize("steps", [STEPS, AGAIN], ids=["one plan", "two plans"])
def test_batches_are_the_same_in_every_way(shards: Path, steps: list[Any]) -> None:
    batches = []
    for way, options in WAYS.items():
        dataset = make_dataset(shards, steps)
        loader = DataLoader(dataset, 4, sampler=EpochSampler(dataset), **options)
        batches.append(list(loader))
        assert loader.calls_dataset == (way == "called")
        assert_same(batches[-1], batches[0])
    assert len(batches[0]) == 3

    dataset = make_dataset(shards, steps)
    dataset.set_epoch(0)  # Torch's loader does not set the epoch.
    loaded = list(torch.utils.data.DataLoader(dataset, 4, collate_fn=list, sampler=EpochSampler(dataset)))
    for samples, (*columns, keys) in zip(loaded, batches[0], strict=True):
        for row, (*values, key) in enumerate(samples):
            assert key == keys[row]
            for column, value in zip(columns, values, strict=True):
                got = [column[name][row] for name in ENTRIES] if isinstance(value, dict) else [column[row]]
                assert_same(got, [*map(as_tensor, map(value.get, ENTRIES) if isinstance(value, dict) else [value])])


@pytest.mark.parametrize("way", WAYS)
def test_a_collate_fn_gets_tensors_of_all_that_follows_the_images(shards: Path, way: str) -> None:
    def load(**more_options: Any) -> Any:
        sampler = EpochSampler(dataset := make_dataset(shards), shuffle=False)
        return next(iter(DataLoader(dataset, 4, sampler=sampler, **WAYS[way], **more_options)))

    batched, samples = load(), load(collate_fn=list)
    for row, (left, mask, annotation, _, depth, more, _) in enumerate(samples):
        given = [left, mask, *(annotation[name] for name in ENTRIES), depth, more]
        assert all(isinstance(value, torch.Tensor) for value in given)
        lefts, masks, annotations, _, depths, mores, _ = batched
        expected = [lefts[row], masks[row], *(annotations[name][row] for name in ENTRIES), depths[row], mores[row]]
        assert_same([value.as_subclass(torch.Tensor) for value in given], expected)
        assert all(type(value.clone()) is torch.Tensor for value in given)
    assert samples[1][2]["id"] == 1


def test_batches_hold_tensors_of_images_and_masks_and_lists_of_boxes(shards: Path) -> None:
    for batch in DevicePrefetcher(DataLoader(make_dataset(shards), batch_size=4), "cpu"):
        lefts, masks, annotation, rights, depths, more, keys = batch
        assert [each.shape[1:] for each in (lefts, masks, depths)] == [(3, 48, 48), (48, 48), (48, 48)]
        assert (masks.dtype, depths.dtype, more[0].dtype) == (torch.uint8, torch.uint16, torch.float64)
        assert torch.equal(lefts, rights)
        numbers = [int(key) for key in keys]
        assert annotation["id"].tolist() == numbers
        assert [len(boxes) for boxes in more] == [number % 4 for number in numbers]
        columns = [annotation[name] for name in ENTRIES]
        assert all(isinstance(column, list) for column in (more, *columns))
        for boxes, labels, _, number in zip(*columns, numbers, strict=True):
            assert (boxes.dtype, labels.dtype) == (torch.float32, torch.int64)
            assert len(boxes) == len(labels) <= number % 4
            assert len(boxes) == 0 or (boxes[:, 2:] - boxes[:, :2]).min() >= 1


def test_the_example_of_the_documentation_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "transforms.md").read_text()
    section = page.partition("## Masks, boxes, points, several pictures")[2].partition("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    samples = [make_sample(n) for n in range(4)]
    renamed = [{"mask.png": files["mask.png"], "json": files["json"], "jpg": files["left.jpg"]} for files in samples]
    write_samples(tmp_path / "scenes.tar", renamed)
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    assert "torch.Size([4, 3, 512, 512]) torch.Size([4, 512, 512]) tensor(" in capsys.readouterr().out


def test_a_field_with_the_name_of_an_entry_comes_first_and_what_is_missing_may_stay_none(tmp_path: Path) -> None:
    boxes = save_npy(np.array([[0.0, 0, 10, 10]]))
    files = {"png": save(make_picture(20, 40), "PNG"), "json": b'{"npy": 3}', "json.npy": boxes}
    shard = write_samples(tmp_path / "a.tar", [files])
    transform = Compose([Resize((10, 80))], fields={"image": "image", "json.npy": "boxes"})
    ((_, annotation, moved),) = ShardDataset(shard, fields=("image", "json", "json.npy"), transform=transform)
    assert annotation == {"npy": 3}
    assert moved.tolist() == [[0, 0, 20, 5]]

    image = save(make_picture(20, 40), "PNG")
    shard = write_samples(tmp_path / "a.tar", [{"png": image, "json": b'{"a": [[1, 2, 3, 4]]}'}, {"png": image}])
    kinds = {"png": "image", "json.a": "boxes", "json.b": "labels"}
    options: dict[str, Any] = {"fields": ("png", "json"), "transform": Compose([CenterCrop(10)], fields=kinds)}
    samples = list(ShardDataset(shard, missing=None, **options))
    assert [annotation and annotation["a"].shape for _, annotation in samples] == [(1, 4), None]
    with pytest.raises(SampleError, match=r"field 'json.b' of sample 000 in .*a.tar.* is missing: .* entries 'a'"):
        next(iter(ShardDataset(shard, **options)))


ANNOTATION = {"boxes": [[1, 2, 3, 4]], "labels": [1], "points": []}
WHERE = r"of sample 002 in .*a\.tar"
BAD_FILES: dict[str, tuple[str, bytes, str]] = {
    "a mask of another size": (
        "mask.png",
        save(Image.new("L", (5, 6)), "PNG"),
        f"field 'mask.png' {WHERE}.* is a mask of 5×6 pixels, but the image has 86×66",
    ),
    "boxes of three numbers": (
        "json",
        json.dumps({**ANNOTATION, "boxes": [[1, 2, 3]]}).encode(),
        rf"field 'json.boxes' {WHERE}.* must be boxes \[k, 4\]",
    ),
    "no mapping": ("json", b"[]", f"field 'json.boxes' {WHERE}.* must be an entry of 'json', got list"),
    "a label too many": (
        "json",
        json.dumps({**ANNOTATION, "labels": [1, 2]}).encode(),
        f"field 'json.labels' {WHERE}.* must have 1 row, one for each of the boxes 'json.boxes'",
    ),
    "a second picture of another size": (
        "right.jpg",
        save(make_picture(9, 8), "JPEG"),
        f"'left.jpg' and 'right.jpg' {WHERE}.* have 86×66 and 8×9 pixels",
    ),
    "a damaged second picture": ("right.jpg", b"no JPEG", f"the image 'right.jpg' {WHERE}.* cannot be"),
    "one damaged inside": ("right.jpg", make_sample(2)["right.jpg"][:-700] + b"\xff\xd9", f"image 'right.jpg' {WHERE}"),
    "a damaged mask": ("mask.png", make_sample(2)["mask.png"][:-50], f"field 'mask.png' {WHERE}.* cannot be decoded"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_an_error_names_the_field_the_sample_and_the_shard(tmp_path: Path, name: str) -> None:
    samples = [make_sample(n) for n in range(4)]
    field, content, message = BAD_FILES[name]
    samples[2][field] = content
    shard = write_samples(tmp_path / "a.tar", samples)
    for steps in (STEPS, [CenterCrop(60)], [CenterCrop(60), ColorJitter(0.4), CenterCrop(50)]):
        with pytest.raises(SampleError, match=message) as caught:
            list(DataLoader(make_dataset(shard, steps), batch_size=4))
        assert (caught.value.row, caught.value.stage) == (2, "decode")


LEFT = {"left.jpg": "image"}
REFUSED: list[tuple[dict[str, str], dict[str, Any], str]] = [
    ({**LEFT, "mask.png": "mask"}, {}, r"has the field 'mask\.png', but fields=.* does not name it"),
    ({"json.boxes": "image"}, {}, r"treats 'json\.boxes' as an image, but it is neither"),
    (LEFT, {"decoders": {"left.jpg": bytes}}, r"'left\.jpg' as an image, but it is neither .* that shardio decodes"),
    (LEFT, {"decode": "pil"}, "needs decode='array'"),
    (LEFT, {"fields": ("left.jpg", "image")}, "names 'image', but the transform's fields do not"),
]


def test_settings_that_do_not_fit_and_masks_that_differ_in_size_are_errors(shards: Path) -> None:
    for kinds, options, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            ShardDataset(
                shards, transform=Compose([CenterCrop(9)], fields=kinds), **{"fields": ("left.jpg", "json"), **options}
            )
    with pytest.raises(TypeError, match="MultiCrop"):
        MultiCrop([Compose([], fields={"image": "image"})])
    with pytest.raises(TypeError, match="would transform only the image"):
        ShardDataset(shards, fields="left.jpg", transform=Compose([np.copy], fields=LEFT))

    transform = Compose([RandomHorizontalFlip()], fields={"left.jpg": "image", "mask.png": "mask"})
    for fields, what in ((("mask.png", "left.jpg"), "arrays"), (("left.jpg", "mask.png"), "images")):
        dataset = ShardDataset(shards, fields=fields, transform=transform)
        with pytest.raises((RuntimeError, ValueError), match=rf"he {what} of a batch differ in .*RandomResizedCrop"):
            list(DataLoader(dataset, batch_size=4))


HEIGHT, WIDTH = 80, 96


def test_values_of_every_type_arrive_whole_and_cropped(tmp_path: Path) -> None:
    shapes = dict.fromkeys(("flow.png", "color.tif", "npy"), ("uint16", 3)) | {"half.npy": ("float16", 2)}
    shapes |= {"ids.tif": ("uint32", 1), "height.tif": ("float64", 1), "change.tif": ("int8", 1), "big.npy": (">u4", 1)}
    stored = {
        name: [make_values(dtype, HEIGHT, WIDTH, *([channels] * (channels > 1)), seed=i) for i in range(4)]
        for name, (dtype, channels) in shapes.items()
    }
    writers: dict[str, Callable[[Any], bytes]] = {"png": write_png, "tif": write_tiff, "npy": save_npy}
    masks = [make_mask(i, HEIGHT, WIDTH) for i in range(4)]
    samples = [
        {name: writers[name.rpartition(".")[2]](values[i]) for name, values in stored.items()}
        | {"jpg": encode(i, width=WIDTH, height=HEIGHT), "mask.png": save(masks[i], "PNG")}
        for i in range(4)
    ]
    stored["mask.png"] = [np.array(mask) for mask in masks]
    shard = write_samples(tmp_path / "a.tar", samples)
    crop = Compose([CenterCrop(64)], fields={"image": "image", **dict.fromkeys(stored, Mask())})
    for transform, of in ((None, np.s_[:]), (crop, np.s_[:, 8:72, 16:80])):
        for options in WAYS.values():
            dataset = ShardMapDataset(shard, fields=("image", *stored), transform=transform)
            (batch,) = DataLoader(dataset, batch_size=4, **options)
            for (name, values), found in zip(stored.items(), batch[1:], strict=True):
                expected = np.stack(values)[of]
                assert found.numpy().dtype == expected.dtype.newbyteorder("="), name
                np.testing.assert_array_equal(found.numpy(), expected, err_msg=name)


def test_pillow_images_keep_their_mode_bytes_come_on_demand_and_a_large_mask_is_an_error(shards: Path) -> None:
    fields, stored = ("left.jpg", "mask.png", "depth.png"), make_sample(3)
    assert [image.mode for image in ShardMapDataset(shards, fields=fields, decode="pil")[3]] == ["RGB", "P", "I;16"]
    decoders: dict[str, Any] = {"left.jpg": bytes, "mask.png": len}
    found = ShardMapDataset(shards, fields=fields[:2], decoders=decoders)[3]
    assert found == (stored["left.jpg"], len(stored["mask.png"]))
    with pytest.raises(SampleError, match=r"field 'mask.png' .* more than max_pixels=5759"):
        ShardMapDataset(shards, fields="mask.png", max_pixels=64 * 90 - 1)[0]


def write_numbers(folder: Path, numbers: list[int]) -> Path:
    jsons = [json.dumps({"parts": [{"number": number}], "x": 0.1234567890123456789}) for number in numbers]
    samples = [{"cls": b"%d" % number, "json": text.encode()} for number, text in zip(numbers, jsons, strict=True)]
    return write_samples(folder / "a.tar", samples)


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1, 10**100])
@pytest.mark.parametrize("field", ["cls", "label", "json"])
def test_integers_that_do_not_fit_in_64_bits_are_errors(tmp_path: Path, field: str, number: int) -> None:
    path = write_numbers(tmp_path, [0, 2**63 - 1, number, -(2**63)])
    named = "json" if field == "json" else "cls"
    with pytest.raises(SampleError, match=rf"field '{named}' of sample 002 in .*a\.tar.*(64 bits|64-bit)") as raised:
        next(iter(DataLoader(ShardDataset(path, fields=field), batch_size=3)))
    assert str(number)[:40] in str(raised.value)
    assert raised.value.key == "002"
    (batch,) = DataLoader(ShardMapDataset(path, fields=field), batch_sampler=[[0, 1, 3]])
    assert (batch["parts"][0]["number"] if field == "json" else batch).tolist() == [0, 2**63 - 1, -(2**63)]


def test_a_collate_fn_without_tensors_receives_wide_integers(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("0.json", json.dumps({"hash": 2**64 - 1}).encode())])
    dataset = ShardDataset(tmp_path / "a.tar", fields="json")
    assert list(DataLoader(dataset, collate_fn=list)) == [[{"hash": 2**64 - 1}]]
    with pytest.raises(ValueError, match=rf"sample 0 of a batch holds the integer {2**64 - 1}, which does not fit"):
        list(DataLoader(dataset, **CALLING))
