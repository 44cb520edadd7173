"""ShardDataset, ShardMapDataset and ImageFolder yield the samples of shards or folders, decoded as requested."""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import tarfile
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import shardio
from shardio import DataLoader, ImageFolder, PackError, SampleError, ShardDataset, ShardMapDataset, pack
from shardio.images import IMAGE_FIELDS
from shardio.libraries import import_torchvision
from shardio.order import RemainderPolicy
from shardio.order.split import POSITIONS_AT_ONCE
from shardio.transforms import Compose, RandomHorizontalFlip, RandomResizedCrop
from tests.raising import assert_raises
from tests.sources import encode, write_images
from tests.tars import write_tar


@pytest.fixture
def rich(tmp_path: Path) -> Path:
    """A flat dataset of four samples with fields of many kinds."""
    (tmp_path / "src").mkdir()
    for number in range(4):
        array = io.BytesIO()
        np.save(array, np.arange(number + 1))
        contents = {"png": encode(number, suffix="png"), "npy": array.getvalue(), "pkl": pickle.dumps({"n": number})}
        contents |= {"json": json.dumps({"number": number}).encode(), "txt": f"größe {number}".encode()}
        for field, content in {**contents, "cls": str(number * 10).encode()}.items():
            (tmp_path / "src" / f"{number}.{field}").write_bytes(content)
    shardio.pack(tmp_path / "src", tmp_path / "out", shuffle_seed=None)
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
    array, tar = io.BytesIO(), tmp_path / "a.tar"
    np.save(array, np.array([{"a": 1}], dtype=object))
    write_tar(tar, [("x.jpg", encode(0)), ("x.npy", array.getvalue()), ("x.cls", b"cat")])
    assert_raises(SampleError, r"field 'npy' of sample x .*trusted=True", list, ShardDataset(tar, fields="npy"))
    assert next(iter(ShardDataset(tar, fields="npy", trusted=True)))[0] == {"a": 1}
    assert_raises(SampleError, "ASCII digits, got b'cat'", list, ShardDataset(tar))


@pytest.mark.parametrize(
    "transform", [RandomResizedCrop(16), Compose([Compose([]), Compose([RandomHorizontalFlip(), id])])]
)
def test_shardios_transforms_refuse_pil_images_and_others_get_them(packed: Path, images: Path, transform: Any) -> None:
    message = r"Random.* takes uint8 .* decode='pil' gives it .* use decode='array'"
    for make, source in ((ShardDataset, packed), (ShardMapDataset, packed), (ImageFolder, images)):
        assert_raises(TypeError, message, make, source, decode="pil", transform=transform)
    taken = Compose([np.asarray, RandomResizedCrop(16)])
    assert ShardMapDataset(packed, fields="image", decode="pil", transform=taken)[0].shape == (3, 16, 16)
    assert next(iter(ShardDataset(packed, fields="image", decode="pil", transform=lambda i: i.size))) == (48, 32)


@pytest.mark.parametrize("fields", [("image",), ("image", "label"), ("label", "key", "image")])
@pytest.mark.parametrize("names", [("cls", "jpg", "json"), ("jpg", "cls", "json")])
def test_errors_name_the_location_of_the_damage(tmp_path: Path, names: Sequence[str], fields: Sequence[str]) -> None:
    contents, source = {"jpg": encode(0)[:-100], "cls": b"0", "json": b"{"}, tmp_path / "a.tar"
    write_tar(source, [(f"x.{name}", contents[name]) for name in names])
    with tarfile.open(source) as tar:
        offsets = {member.name: member.offset_data for member in tar}
    for some, field in ((fields, "jpg"), (("key", "cls", "json"), "json")):
        where = f"{source} at byte {offsets[f'x.{field}']}"
        dataset: Any = ShardMapDataset(source, fields=tuple(some))
        assert assert_raises(SampleError, f"sample x in {where} cannot", dataset.__getitem__, 0).where == where


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


def test_any_policy_that_uses_the_batch_size_requires_one(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(num_left: int, world_size: int, batch_size: int) -> int:
        return num_left + -num_left % (world_size * batch_size)

    for use in (iter, len):
        message = r"remainder='drop' leaves .* set ShardDataset\(batch_size="
        assert_raises(ValueError, message, use, ShardDataset(packed, remainder="drop"))
    policy = RemainderPolicy(effect="fills the last batch", count_dealt=fill, repeats=True, uses_batch_size=True)
    for module in ("shardio.order.split", "shardio.datasets.ranked"):
        monkeypatch.setattr(f"{module}.POLICIES", {"pad": policy})
    message = "remainder='pad' fills the last batch, depending on the batch"
    assert_raises(ValueError, message, iter, ShardDataset(packed))
    assert len(list(ShardDataset(packed, fields="key", batch_size=8))) == 24


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
    write_tar(tmp_path / "a.tar", [("x.jpg", b""), ("x.cls", b"0"), ("y.cls", b"0"), ("z.json", b"{}")])
    for index, fields, words in (
        (0, "image", r"the image of sample x in .*a\.tar.* cannot be decoded: it is empty"),
        (1, "image", r"sample y in .*a\.tar.* has no image"),
        (0, "json", r"sample x in .*a\.tar.* has no field 'json'"),
    ):
        assert_raises(SampleError, words, ShardMapDataset(tmp_path / "a.tar", fields=fields).__getitem__, index)
    choices = r"no sample of .* has the field 'json': choose fields=\.\.\. from image, key, label, cls, jpg"
    assert_raises(ValueError, choices, ShardDataset, packed, fields=("image", "json"))
    write_tar(tmp_path / "b.tar", [("x.jpg", encode(0))])
    assert_raises(ValueError, "has the field 'label'", ShardMapDataset, tmp_path / "b.tar")


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"remainder": "mask", "batch_size": 64}])
def test_more_samples_than_the_order_computes_at_once_are_delivered_once_each(tmp_path: Path, options: Any) -> None:
    numbers = [f"{number:05d}" for number in range(2 * POSITIONS_AT_ONCE + 100)]
    write_tar(tmp_path / "many.tar", [(f"{number}.cls", b"1") for number in numbers])
    dataset = ShardDataset(tmp_path / "many.tar", fields=("key",), shuffle=True, **options)
    assert sorted(sample[0] for sample in dataset) == numbers


def test_samples_are_the_files_by_class_directory_and_name(tmp_path: Path) -> None:
    for name in ("b/2.jpg", "b/10.PNG", "a/z/1.jpeg", "a/y.webp", "a/.hidden.jpg", "a/notes.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode(1, suffix=path.suffix[1:]) if path.suffix != ".txt" else b"")
    folder = ImageFolder(tmp_path)
    names = [(os.path.relpath(path, tmp_path), label) for path, label in folder.samples]
    assert names == [("a/y.webp", 0), ("a/z/1.jpeg", 0), ("b/10.PNG", 1), ("b/2.jpg", 1)]
    assert (folder.classes, folder.class_to_idx, folder.targets) == (["a", "b"], {"a": 0, "b": 1}, [0, 0, 1, 1])
    assert len(folder) == 4
    assert isinstance(folder.samples, shardio.SharedList), "workers share the list"


def test_an_item_is_the_picture_as_a_tensor_and_its_label(images: Path) -> None:
    folder = ImageFolder(images)
    for index in (0, 8, -1):
        image, label = folder[index]
        path, expected = folder.samples[index]
        pixels = np.asarray(Image.open(path).convert("RGB"))
        assert (label, image.dtype) == (expected, torch.uint8)
        assert torch.equal(image, torch.from_numpy(pixels.copy()).permute(2, 0, 1))
    assert ImageFolder(images, transform=lambda image: image.size, decode="pil")[0][0] == (48, 32)
    for index in (21, -22):
        assert_raises(IndexError, f"index {index} is out of range for a dataset of 21", folder.__getitem__, index)


def test_orientation_is_honored_by_choice(tmp_path: Path) -> None:
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (40, 20)).save(file, "JPEG", exif=exif)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.jpg").write_bytes(file.getvalue())
    assert ImageFolder(tmp_path)[0][0].shape == (3, 20, 40)
    assert ImageFolder(tmp_path, orientation="apply")[0][0].shape == (3, 40, 20)


def test_a_missing_or_flat_directory_and_an_empty_class_are_named(tmp_path: Path) -> None:
    assert_raises(FileNotFoundError, r"the directory .*nowhere does not exist", ImageFolder, tmp_path / "nowhere")
    (tmp_path / "x.jpg").write_bytes(encode(0))
    assert_raises(FileNotFoundError, "has no class folders", ImageFolder, tmp_path)
    write_images(tmp_path, classes=1)
    (tmp_path / "empty").mkdir()
    assert_raises(FileNotFoundError, r"class folder .*empty holds no images: add images", ImageFolder, tmp_path)


def test_a_damaged_or_vanished_image_is_named(tmp_path: Path) -> None:
    write_images(tmp_path, classes=1, per_class=2)
    folder = ImageFolder(tmp_path)
    first, second = (Path(path) for path, _ in folder.samples)
    for content, words in ((first.read_bytes()[:-100], "Premature end"), (b"", "it is empty")):
        first.write_bytes(content)
        assert_raises(SampleError, rf"name-000\.jpg in .* cannot be decoded: {words}", folder.__getitem__, 0)
    second.unlink()
    assert_raises(SampleError, r"name-001\.jpg cannot be read", folder.__getitem__, 1)


def test_labels_that_are_set_are_integers(images: Path) -> None:
    folder: Any = ImageFolder(images)
    found = folder.samples
    folder.samples = [(path, np.int16(3 + label)) for path, label in found]
    assert folder[8][1] == folder.targets[8] == 4
    loaders = [DataLoader(folder, batch_size=4), DataLoader(folder, batch_size=4, worker_init_fn=lambda _: None)]
    message = r"the labels in ImageFolder.samples must be integers, got .* for /.*name-000\.jpg"
    for label in (0.5, 1.0, "1", None, [0, 1]):
        folder.samples = [(path, label) for path, _ in found]
        assert_raises(TypeError, message, folder.__getitem__, 0)
        for loader in loaders:
            assert_raises(TypeError, r"ImageFolder\.samples must be integers", list, loader)


def test_pictures_that_are_left_out_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_images(tmp_path / "in", classes=2, per_class=2)
    ImageFolder(tmp_path / "in")  # A warning would be an error in these tests.
    for name in ("class-0/x.gif", "class-1/y.GIF", "class-1/z.jfif", "class-1/notes.md"):
        (tmp_path / "in" / name).write_bytes(b"x")
    message = r"left out images in other formats \(2 \.gif, 1 \.jfif\): only \.jpg, "
    with pytest.warns(RuntimeWarning, match=message) as warned:
        assert len(ImageFolder(tmp_path / "in")) == 4
    assert [warning.filename for warning in warned] == [__file__]
    pack(tmp_path / "in", tmp_path / "out")
    assert "(2 .gif, 1 .jfif): only" in caplog.text


PIXELS = (np.arange(24 * 16 * 3).reshape(24, 16, 3) * 56 % 65536).astype(np.uint16)

NETPBM = {
    "color.ppm": b"P6\n16 24\n255\n" + (PIXELS >> 8).astype(np.uint8).tobytes(),
    "commented.PPM": b"P6 # by hand\n16 24 255\n" + (PIXELS & 255).astype(np.uint8).tobytes(),
    "gray.pgm": b"P5\n16 24\n255\n" + (PIXELS[..., 0] >> 8).astype(np.uint8).tobytes(),
    "few-levels.pgm": b"P5\n16 24\n15\n" + (PIXELS[..., 0] >> 12).astype(np.uint8).tobytes(),
    "plain.ppm": b"P3\n16 24\n255\n" + b" ".join(b"%d" % value for value in (PIXELS >> 8).ravel()),
    "16-bits.pgm": b"P5\n16 24\n65535\n" + PIXELS[..., 0].astype(">u2").tobytes(),
}
"""Files in Netpbm's formats, as its specification (netpbm.sourceforge.net/doc/ppm.html) describes them."""


def test_files_of_netpbm_are_images(tmp_path: Path) -> None:
    """torchvision's ImageFolder reads ``.ppm`` and ``.pgm`` files, and returns the pixels that Pillow decodes."""
    import_torchvision()
    folders = pytest.importorskip("torchvision.datasets.folder")
    assert {suffix[1:] for suffix in folders.IMG_EXTENSIONS} <= set(IMAGE_FIELDS)
    for name, content in NETPBM.items():
        path = tmp_path / "in" / name.partition(".")[2].lower() / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    theirs, ours = folders.ImageFolder(tmp_path / "in"), ImageFolder(tmp_path / "in")
    assert (list(ours.samples), ours.classes) == (theirs.samples, theirs.classes)
    pack(tmp_path / "in", tmp_path / "out", shuffle_seed=None)
    packed = {key: rest for key, *rest in ShardDataset(tmp_path / "out", fields=("key", "image", "label"))}
    with pytest.warns(UserWarning, match="gray images store values other than uint8"):  # one has 16 bits
        loaded = torch.cat([images for images, _ in DataLoader(ours, batch_size=4)])
    assert len(ours) == len(packed) == len(loaded) == len(NETPBM)
    for i, (path, label) in enumerate(theirs.samples):
        expected = torch.from_numpy(np.asarray(theirs[i][0]).copy()).permute(2, 0, 1)
        found, same_label = packed[f"{Path(path).parent.name}/{Path(path).stem}"]
        assert all(torch.equal(each, expected) for each in (ours[i][0], loaded[i], found))
        assert same_label == label


def test_a_class_folder_of_images_that_are_not_read_says_what_to_do(tmp_path: Path) -> None:
    write_images(tmp_path / "in", classes=1, per_class=1)
    (tmp_path / "in" / "other").mkdir()
    (tmp_path / "in" / "other" / "a.gif").write_bytes(b"x")
    message = r"other holds no images: left out .* \(1 \.gif\).* --convert-to"
    assert_raises(FileNotFoundError, message, ImageFolder, tmp_path / "in")
    for source in (tmp_path / "in", tmp_path / "in" / "other"):
        message = r"holds no images that can be packed \(.*--convert-to .* accepts avif, .*gif"
        assert_raises(PackError, message, pack, source, tmp_path / "out")


either = pytest.mark.parametrize("read", [ImageFolder, lambda root: pack(root, root.parent / "out")])


@either
def test_a_link_to_a_class_folder_that_is_gone_is_named(tmp_path: Path, read: Callable[[Path], Any]) -> None:
    """Leaving out the class would change the labels of other classes."""
    write_images(tmp_path / "in")
    (tmp_path / "in" / "class-0a").symlink_to(tmp_path / "elsewhere")
    with pytest.raises((FileNotFoundError, PackError), match=r"class-0a is a symbolic link whose target does not"):
        read(tmp_path / "in")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a.jpg").write_bytes(encode(0))
    assert list(read(tmp_path / "in").classes) == ["class-0", "class-0a", "class-1", "class-2"]


@either
def test_classes_whose_names_look_the_same_are_refused(tmp_path: Path, read: Callable[[Path], Any]) -> None:
    for form in ("NFC", "NFD"):
        folder = tmp_path / "in" / unicodedata.normalize(form, "caf\N{LATIN SMALL LETTER E WITH ACUTE}")
        folder.mkdir(parents=True)
        (folder / f"{form}.jpg").write_bytes(encode(0))
    with pytest.raises((ValueError, PackError), match=r"two classes that look the same, 'cafe\\u0301' and 'caf\\xe9'"):
        read(tmp_path / "in")


def test_splits_as_classes_give_a_warning(tmp_path: Path) -> None:
    for name in ("train/cat/a.jpg", "val/cat/b.jpg"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(encode(0))
    with pytest.warns(RuntimeWarning, match=f"classes train, val look like the splits .* such as {tmp_path}/train"):
        ImageFolder(tmp_path)
    assert ImageFolder(tmp_path / "train").classes == ["cat"]
