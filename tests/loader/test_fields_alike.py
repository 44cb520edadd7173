"""A Compose with fields transforms a sample's images, masks, boxes and points alike, in every way it is loaded."""

from __future__ import annotations

import io
import json
import re
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
from tests.images.pictures import make_picture, save
from tests.tars import write_tar

ROOT = Path(__file__).parents[2]
NUM_SAMPLES = 10
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
STEPS = [RandomResizedCrop(48, antialias=True), RandomHorizontalFlip(), TrivialAugmentWide(), ColorJitter(0.4)]
AGAIN = [*STEPS, RandomHorizontalFlip(), CenterCrop(56)]  # A geometry after operations, so they are rendered first.


def make_sample(number: int) -> dict[str, bytes]:
    """Return a sample's files: both pictures are the same, and so are its two lists of boxes."""
    height, width = 64 + number, 90 - 2 * number
    picture = save(make_picture(height, width, number), "JPEG")
    random = np.random.default_rng(number)
    mask = Image.fromarray(random.integers(0, 5, (height, width), np.uint8), "P")
    mask.putpalette(range(15))
    depth = Image.fromarray(random.integers(0, 1 << 16, (height, width), np.uint16))
    boxes = np.sort(random.uniform(0, 60, (number % 4, 2, 2)), axis=1).reshape(-1, 4)
    points = [[12.5, 30, 2], [50, 8, 1]]
    annotation = {"boxes": boxes.tolist(), "labels": list(range(len(boxes))), "points": points, "id": number}
    array = io.BytesIO()
    np.save(array, boxes)
    return {
        "left.jpg": picture,
        "right.jpg": picture,
        "mask.png": save(mask, "PNG"),
        "depth.png": save(depth, "PNG"),
        "json": json.dumps(annotation).encode(),
        "more.npy": array.getvalue(),
    }


def write_samples(path: Path, samples: list[dict[str, bytes]]) -> Path:
    members = [(f"{n:03d}.{field}", content) for n, sample in enumerate(samples) for field, content in sample.items()]
    write_tar(path, members)
    return path


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_samples(tmp_path_factory.mktemp("alike") / "a.tar", [make_sample(n) for n in range(NUM_SAMPLES)])


def make_dataset(shards: Path, steps: list[Any] = STEPS, **kinds: Any) -> ShardMapDataset:
    return ShardMapDataset(shards, fields=FIELDS, transform=Compose(steps, fields={**KINDS, **kinds}))


def assert_same(one: Any, other: Any) -> None:
    """Compare nested values by their types, and tensors and arrays by their values."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor | np.ndarray):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        assert_same(list(one.values()), list(other.values()))
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_same(left, right)
    else:
        assert one == other


def _do_nothing(worker_id: int) -> None:
    """Make the loader call the dataset in its workers."""


@pytest.mark.parametrize("steps", [STEPS, AGAIN], ids=["one plan", "two plans"])
def test_batches_are_the_same_in_every_way(shards: Path, steps: list[Any]) -> None:
    ways: list[tuple[bool, dict[str, Any]]] = [
        (False, {"num_workers": 0}),
        (False, {"num_workers": 2}),
        (True, {"num_workers": 1, "worker_init_fn": _do_nothing}),
    ]
    batches = []
    for calls_dataset, options in ways:
        dataset = make_dataset(shards, steps)
        loader = DataLoader(dataset, 4, sampler=EpochSampler(dataset), **options)
        batches.append(list(loader))
        assert loader.calls_dataset == calls_dataset
    assert len(batches[0]) == 3
    for others in batches[1:]:
        assert_same(batches[0], others)

    dataset = make_dataset(shards, steps)
    dataset.set_epoch(0)  # torch's loader does not tell it.
    loaded = list(torch.utils.data.DataLoader(dataset, 4, collate_fn=list, sampler=EpochSampler(dataset)))
    for samples, (*columns, keys) in zip(loaded, batches[0], strict=True):
        for row, (*values, key) in enumerate(samples):
            assert key == keys[row]
            assert_same((*values, key), dataset[int(key)])
            for column, value in zip(columns, values, strict=True):
                if isinstance(value, dict):
                    of_row = [column[name][row] for name in ("boxes", "labels", "points")]
                    assert_same(of_row, [as_tensor(value[name]) for name in ("boxes", "labels", "points")])
                else:
                    assert_same(column[row], as_tensor(value))


def as_tensor(value: Any) -> torch.Tensor:
    return value.as_subclass(torch.Tensor) if isinstance(value, torch.Tensor) else torch.from_numpy(np.array(value))


def transpose(samples: list[Any]) -> list[list[Any]]:
    """Collate as for torchvision's detection models, which take lists."""
    return [list(column) for column in zip(*samples, strict=True)]


@pytest.mark.parametrize(
    "options",
    [{}, {"num_workers": 1}, {"num_workers": 1, "worker_init_fn": _do_nothing}],
    ids=["calling process", "worker process", "the dataset in a worker"],
)
def test_a_collate_fn_gets_tensors_of_all_that_follows_the_images(shards: Path, options: dict[str, Any]) -> None:
    def load(**more_options: Any) -> Any:
        dataset = make_dataset(shards)
        sampler = EpochSampler(dataset, shuffle=False)
        return next(iter(DataLoader(dataset, 4, sampler=sampler, **options, **more_options)))

    batched = load()
    lefts, masks, annotations, _, depths, more, _ = load(collate_fn=transpose)
    for row in range(4):
        entries = [annotations[row][name] for name in ("boxes", "labels", "points")]
        given = [lefts[row], masks[row], *entries, depths[row], more[row]]
        assert all(isinstance(value, torch.Tensor) for value in given)
        entries = [batched[2][name][row] for name in ("boxes", "labels", "points")]
        expected = [batched[0][row], batched[1][row], *entries, batched[4][row], batched[5][row]]
        assert all(type(value) is torch.Tensor for value in expected)
        for one, other in zip(given, expected, strict=True):
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            assert torch.equal(one, other)
            assert type(one.clone()) is torch.Tensor
    assert annotations[1]["boxes"].dtype == torch.float32
    assert annotations[1]["labels"].dtype == torch.int64
    assert annotations[1]["id"] == 1


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_hold_tensors_of_images_and_masks_and_lists_of_boxes(shards: Path, num_workers: int) -> None:
    loader = DataLoader(make_dataset(shards), batch_size=4, num_workers=num_workers)
    for batch in DevicePrefetcher(loader, "cpu"):
        lefts, masks, annotation, rights, depths, more, keys = batch
        assert (lefts.shape, masks.shape, depths.shape) == (
            (len(keys), 3, 48, 48),
            (len(keys), 48, 48),
            (len(keys), 48, 48),
        )
        assert (masks.dtype, depths.dtype) == (torch.uint8, torch.uint16)
        assert torch.equal(lefts, rights)
        for values in (more, annotation["boxes"], annotation["labels"], annotation["points"]):
            assert isinstance(values, list)
            assert all(isinstance(value, torch.Tensor) for value in values)
            assert len(values) == len(keys)
        assert annotation["id"].tolist() == [int(key) for key in keys]
        for boxes, labels, key in zip(annotation["boxes"], annotation["labels"], keys, strict=True):
            assert (boxes.dtype, labels.dtype) == (torch.float32, torch.int64)
            assert len(boxes) == len(labels) <= int(key) % 4
            assert len(boxes) == 0 or (boxes[:, 2:] - boxes[:, :2]).min() >= 1
        assert [len(boxes) for boxes in more] == [int(key) % 4 for key in keys]
        assert more[0].dtype == torch.float64


def test_the_example_of_the_documentation_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "transforms.md").read_text()
    section = page.partition("## Masks, boxes, points, several pictures")[2].partition("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    samples = [make_sample(n) for n in range(4)]
    renamed = [{**{name: files[name] for name in ("mask.png", "json")}, "jpg": files["left.jpg"]} for files in samples]
    write_samples(tmp_path / "scenes.tar", renamed)
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    assert "torch.Size([4, 3, 512, 512]) torch.Size([4, 512, 512]) tensor(" in capsys.readouterr().out


def test_a_field_with_the_name_of_an_entry_comes_first(tmp_path: Path) -> None:
    boxes = io.BytesIO()
    np.save(boxes, np.array([[0.0, 0, 10, 10]]))
    files = {"png": save(make_picture(20, 40), "PNG"), "json": b'{"npy": 3}', "json.npy": boxes.getvalue()}
    shard = write_samples(tmp_path / "a.tar", [files])
    transform = Compose([Resize((10, 80))], fields={"image": "image", "json.npy": "boxes"})
    ((_, annotation, moved),) = ShardDataset(shard, fields=("image", "json", "json.npy"), transform=transform)
    assert annotation == {"npy": 3}
    assert moved.tolist() == [[0, 0, 20, 5]]


def test_what_a_sample_lacks_stays_none_if_that_is_allowed(tmp_path: Path) -> None:
    image = save(make_picture(20, 40), "PNG")
    shard = write_samples(tmp_path / "a.tar", [{"png": image, "json": b'{"a": [[1, 2, 3, 4]]}'}, {"png": image}])
    kinds = {"png": "image", "json.a": "boxes", "json.b": "labels"}
    options: dict[str, Any] = {"fields": ("png", "json"), "transform": Compose([CenterCrop(10)], fields=kinds)}
    samples = list(ShardDataset(shard, missing=None, **options))
    assert [annotation and annotation["a"].shape for _, annotation in samples] == [(1, 4), None]
    with pytest.raises(SampleError, match=r"field 'json.b' of sample 000 in .*a.tar.* is missing: .* entries 'a'"):
        next(iter(ShardDataset(shard, **options)))


ANNOTATION = {"boxes": [[1, 2, 3, 4]], "labels": [1], "points": []}
BAD_FILES: dict[str, tuple[dict[str, bytes], str]] = {
    "a mask of another size": (
        {"mask.png": save(Image.new("L", (5, 6)), "PNG")},
        "field 'mask.png' of sample 002 in .*a.tar.* is a mask of 5×6 pixels, but the image has 86×66",
    ),
    "boxes of three numbers": (
        {"json": json.dumps({**ANNOTATION, "boxes": [[1, 2, 3]]}).encode()},
        r"field 'json.boxes' of sample 002 in .*a.tar.* must be boxes \[k, 4\]",
    ),
    "no mapping": ({"json": b"[]"}, "field 'json.boxes' of sample 002 in .* must be an entry of 'json', got list"),
    "a label too many": (
        {"json": json.dumps({**ANNOTATION, "labels": [1, 2]}).encode()},
        "field 'json.labels' of sample 002 in .* must have one row for each of the 1 boxes 'json.boxes'",
    ),
    "a second picture of another size": (
        {"right.jpg": save(make_picture(9, 8), "JPEG")},
        "'left.jpg' and 'right.jpg' of sample 002 in .*a.tar.* have 86×66 and 8×9 pixels",
    ),
    "a damaged second picture": ({"right.jpg": b"no JPEG"}, "the image 'right.jpg' of sample 002 in .* cannot be"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_an_error_names_the_field_the_sample_and_the_shard(tmp_path: Path, name: str) -> None:
    samples = [make_sample(n) for n in range(4)]
    files, message = BAD_FILES[name]
    samples[2].update(files)
    dataset = make_dataset(write_samples(tmp_path / "a.tar", samples))
    with pytest.raises(SampleError, match=message) as caught:
        list(DataLoader(dataset, batch_size=4))
    assert (caught.value.row, caught.value.stage) == (2, "decode")


def test_a_second_picture_that_is_damaged_inside_is_an_error_of_its_sample(tmp_path: Path) -> None:
    samples = [make_sample(n) for n in range(3)]
    samples[1]["right.jpg"] = samples[1]["right.jpg"][:-200] + b"\xff\xd9"
    shard = write_samples(tmp_path / "a.tar", samples)
    for steps in ([CenterCrop(60)], [CenterCrop(60), ColorJitter(0.4), CenterCrop(50)]):
        with pytest.raises(SampleError, match=r"the image 'right.jpg' of sample 001 in .*a.tar"):
            list(DataLoader(make_dataset(shard, steps), batch_size=3))


def test_masks_that_differ_in_size_are_an_error_with_a_remedy(shards: Path) -> None:
    transform = Compose([RandomHorizontalFlip()], fields={"left.jpg": "image", "mask.png": "mask"})
    for fields, what in ((("mask.png", "left.jpg"), "arrays"), (("left.jpg", "mask.png"), "images")):
        dataset = ShardDataset(shards, fields=fields, transform=transform)
        with pytest.raises((RuntimeError, ValueError), match=rf"he {what} of a batch differ in .*RandomResizedCrop"):
            list(DataLoader(dataset, batch_size=4))


def test_settings_that_do_not_fit_are_errors(shards: Path) -> None:
    def make(kinds: dict[str, Any], fields: Any = ("left.jpg", "json"), **options: Any) -> ShardDataset:
        return ShardDataset(shards, fields=fields, transform=Compose([CenterCrop(9)], fields=kinds), **options)

    with pytest.raises(ValueError, match=r"has the field 'mask\.png', but fields=.* does not name it"):
        make({"left.jpg": "image", "mask.png": "mask"})
    with pytest.raises(ValueError, match=r"has the image 'json\.boxes', but an image is"):
        make({"json.boxes": "image"})
    with pytest.raises(ValueError, match=r"'left\.jpg', but an image is 'image' or a field that shardio decodes"):
        make({"left.jpg": "image"}, decoders={"left.jpg": bytes})
    with pytest.raises(ValueError, match="needs decode='array'"):
        make({"left.jpg": "image"}, decode="pil")
    with pytest.raises(ValueError, match="names 'image', but those of the transform do not"):
        make({"left.jpg": "image"}, fields=("left.jpg", "image"))
    with pytest.raises(TypeError, match="MultiCrop"):
        MultiCrop([Compose([], fields={"image": "image"})])
    with pytest.raises(TypeError, match="would transform only the image"):
        ShardDataset(shards, fields="left.jpg", transform=Compose([np.copy], fields={"left.jpg": "image"}))
