"""Sources that do not look like class folders are rejected; the error messages contain commands that pack them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import shardio
from shardio import PackError
from shardio.packing import OnIncomplete
from tests.cli.commands import run
from tests.packing.packs import assert_refused, pack, read_packed, write
from tests.raising import assert_raises

NUMBERS = [f"{i:04d}" for i in range(4)]
LETTERS = ["bridge", "church", "tower", "wall"]

CITYSCAPES = [
    f"{top}/{split}/{city}/{city}_{number}_{top}{end}"
    for split, city in (("train", "aachen"), ("train", "ulm"), ("val", "bonn"))
    for number in range(2)
    for top, ends in (("leftImg8bit", [".png"]), ("gtFine", ["_labelIds.png", "_color.png", "_polygons.json"]))
    for end in ends
]


def folders(*names: str, stems: list[str] = LETTERS, suffix: str = "jpg") -> list[str]:
    return [f"{name}/{stem}.{suffix}" for name in names for stem in stems]


# Files in the source, and a part of the error message. The test runs the commands in the message.
AMBIGUOUS = {
    "masks": ([*folders("images"), *folders("masks", suffix="png")], "images/ and masks/"),
    "masks-numbered": (folders("images", "masks", stems=NUMBERS, suffix="png"), "images/ and masks/"),
    "labels": ([*folders("images"), *folders("labels", suffix="txt")], "images/ and labels/"),
    "other": (
        [*folders("JPEGImages", "extra"), *folders("Annotations", suffix="xml")],
        "JPEGImages/ and Annotations/",
    ),
    "other-numbered": ([*folders("images", "masks", stems=NUMBERS), *folders("extra")], "images/ and masks/"),
    "masks-of-splits": (["images/train/a.jpg", "images/val/b.jpg", "masks/train/a.png", "masks/val/b.png"], "masks/"),
    "classes-of-splits": (folders("cat/train", "cat/val", "dog/train", "dog/val"), "cat holds train/ and val/"),
    "some-splits": (folders("train", "test", "extra"), "extra/ and test/"),
    "imagenet": (folders("train/cat", "train/dog", "val/cat", "val/dog"), "train/ and val/"),
    "coco": (folders("train2017", "val2017", "test2017"), "train2017/, test2017/ and val2017/"),
    "kaggle": (folders("training_set/cats", "test_set/cats"), "training_set/ and test_set/"),
    "two-domains": (folders("trainA", "trainB", "testA", "testB"), "trainA/, trainB/, testA/ and testB/"),
    "train-alone": (folders("train/cat", "train/dog"), "train/"),
    "cityscapes": (CITYSCAPES, "leftImg8bit/ and gtFine/"),
    "mmsegmentation": (
        ["img_dir/train/a.jpg", "img_dir/val/b.jpg", "ann_dir/train/a.png", "ann_dir/val/b.png"],
        "img_dir/ and ann_dir/",
    ),
    "nnu-net": (["imagesTr/a.png", "imagesTr/b.png", "labelsTr/a.png", "labelsTr/b.png"], "imagesTr/ and labelsTr/"),
    "oxford-pets": (
        [*folders("images"), *folders("annotations/trimaps", suffix="png"), "annotations/list.txt"],
        "images/ and annotations/",
    ),
    "suffixes": (["images/a.jpg", "images/b.jpg", "masks/a_mask.png", "masks/b_mask.png"], "images/ and masks/"),
    "coco-in-one-file": ([*folders("images"), "annotations/instances.json"], "holds images only in images/"),
    "flowers": ([*folders("jpg"), "imagelabels.txt"], "holds images only in jpg/"),
    "celeba": ([*folders("img_align_celeba"), "list_attr_celeba.txt"], "holds images only in img_align_celeba/"),
    "one-level-too-high": (folders("photos/cat", "photos/dog"), "holds only the folder photos/"),
}


def follow(message: str) -> None:
    """Run the commands in an error message. If a command is rejected, run the commands in its error message."""
    commands = re.findall(r"^  (shardio pack .*)$", message, re.MULTILINE)
    assert commands
    for command in commands:
        program, *arguments = shlex.split(command)
        assert program == "shardio"
        done = run(*arguments, code=None)
        if isinstance(done.exception, PackError):
            assert command not in str(done.exception)
            follow(str(done.exception))
        else:
            assert done.exit_code == 0, done.output


def fields_of(out: Path) -> dict[str, list[str]]:
    return {key: sorted(fields) for key, fields in read_packed(out).items()}


@pytest.mark.parametrize(("names", "words"), AMBIGUOUS.values(), ids=AMBIGUOUS.keys())
def test_another_layout_is_refused_with_commands_that_work(tmp_path: Path, names: list[str], words: str) -> None:
    source, out = write(tmp_path / "in it", names), tmp_path / "out"
    message = assert_refused(words, source, out)
    assert not out.exists()
    follow(message)


def test_layout_classes_makes_each_folder_a_class_and_layout_flat_none(tmp_path: Path) -> None:
    for name, (names, _) in AMBIGUOUS.items():
        images = [path for path in names if not path.endswith((".json", ".txt", ".xml"))]
        write(tmp_path / name, images)
        manifest = shardio.pack(tmp_path / name, tmp_path / "out" / name, layout="classes", source_split="all")
        assert manifest.classes == tuple(sorted({path.split("/")[0] for path in images}))
        assert manifest.num_samples == len(images)
    write(tmp_path / "in", ["a.jpg", "x/a.jpg", "x/y/b.jpg", "x/y/b.cls"])
    manifest = shardio.pack(tmp_path / "in", tmp_path / "flat", layout="flat")
    assert (manifest.classes, sorted(fields_of(tmp_path / "flat"))) == ((), ["a", "x/a", "x/y/b"])


SPLIT_SOURCES: dict[str, tuple[str, dict[str, Any]]] = {
    "pairs": ("train/a train/b val/a", {"layout": "pairs"}),
    "flat": ("train/a train/b val/a", {"layout": "flat"}),
    "deep": ("x/480p/train/a x/480p/train/b x/480p/test/a", {"layout": "flat"}),
    "classes": ("cat/train/a dog/train/b cat/test/a dog/test/b", {}),
    "chosen classes": ("cat/train/a dog/train/b cat/test/a dog/test/b", {"layout": "classes"}),
}
"""The keys of a source's samples in all splits, and the options of the pack."""


@pytest.mark.parametrize(("keys", "options"), SPLIT_SOURCES.values(), ids=SPLIT_SOURCES)
@pytest.mark.parametrize("labeled", [False, True])
def test_splits_are_packed_apart(tmp_path: Path, keys: str, options: dict[str, Any], labeled: bool) -> None:
    out, all_keys = tmp_path / "out it", keys.split()
    names = [f"{key}.jpg" for key in all_keys]
    if options.get("layout") == "pairs":
        names = [*(f"images/{name}" for name in names), *(f"labels/{key}.txt" for key in (*all_keys, "classes"))]
    source = write(tmp_path / "in", names)
    if labeled:
        (tmp_path / "labels.csv").write_text("key,label\n" + "".join(f"{key},1\n" for key in sorted(all_keys)))
        options = options | {"labels": tmp_path / "labels.csv"}
    message = assert_refused("look like the splits of a dataset, but would be packed as one", source, out, **options)
    assert not out.exists()
    follow(message)
    for path in sorted(out.iterdir()):
        assert set(fields_of(path)) == {key for key in all_keys if path.name in key.split("/")}
        assert "cls" not in next(iter(fields_of(path).values())) or labeled or keys.startswith("cat")
    shardio.pack(source, tmp_path / "all", source_split="all", **options)
    assert set(fields_of(tmp_path / "all")) == set(all_keys)


def test_a_split_must_be_there_and_must_not_be_a_class(tmp_path: Path) -> None:
    source, out = write(tmp_path / "in", folders("train/cat", "val/cat", "train/dog")), tmp_path / "out"
    assert_refused(r"no folder named 'dev' .*\(--source-split\): .* splits train/ and val/", source, source_split="dev")
    for layout in ("auto", "classes"):
        options = {"source_split": "train", "layout": layout}
        follow(assert_refused(r"\n  shardio pack \S+/in/train ", source, tmp_path / layout, **options))
    assert_raises(ValueError, "source_split", shardio.pack, source, out, source_split="")


def test_dotted_pairs_of_splits_do_not_become_classes(tmp_path: Path) -> None:
    source = write(tmp_path / "in", [f"{split}/a.{end}" for split in ("train", "val") for end in ("jpg", "mask.png")])
    options = {"layout": "pairs", "source_split": "all"}
    follow(assert_refused("look like the splits of a dataset, not classes", source, tmp_path / "out", **options))
    assert fields_of(tmp_path / "out" / "val") == {"a": ["jpg", "mask.png"]}


ORDINARY = {
    "same-numbers": folders("bus", "train", "car", stems=NUMBERS),
    "same-stems": folders("real", "fake"),
    "train-the-vehicle": folders("train", "bus"),
    "a-mask-is-worn": folders("with_mask", "without_mask", stems=NUMBERS),
    "images-and-another-class": folders("images", "drawings", stems=NUMBERS),
    "same-numbers-in-most": [*folders("photo", "box", "cup", stems=NUMBERS), *folders("cap", stems=NUMBERS[:2])],
    "labels-are-a-class": folders("bottles", "labels", stems=NUMBERS),
    "tests": folders("test tubes", "val d'isere"),
    "deep": ["cats/a/1.jpg", "cats/b/2.jpg", "dogs/c/1.jpg"],
    "one-class": folders("cats"),
    "one-class-deep": ["cats/a/1.jpg", "cats/2.jpg"],
    "flat": ["train.jpg", "val.jpg", "mask.jpg"],
}


@pytest.mark.parametrize("names", ORDINARY.values(), ids=ORDINARY.keys())
def test_ordinary_directories_are_packed(tmp_path: Path, names: list[str]) -> None:
    write(tmp_path / "in", names)
    manifest = shardio.pack(tmp_path / "in", tmp_path / "out")
    assert manifest.num_samples == len(names)
    assert list(manifest.classes) == sorted({name.split("/")[0] for name in names if "/" in name})


PAIRS: dict[str, tuple[str, dict[str, str]]] = {
    "folders": ("images/a.jpg images/b.jpg masks/a.png masks/b.png", {"a": "jpg masks.png"}),
    "two companions": (
        "images/a.jpg Masks/a.png labels/a.txt labels/classes.txt README",
        {"a": "jpg labels.txt masks.png"},
    ),
    "names of folders": (
        "images/a_image.jpg images/b_image.jpg masks/a_mask.png masks/b_mask.png",
        {"a": "jpg masks.png", "b": "jpg masks.png"},
    ),
    "exact names": (
        "images/a.jpg images/a_mask.jpg masks/a.png masks/a_mask.png",
        {"a": "jpg masks.png", "a_mask": "jpg masks.png"},
    ),
    "folders in folders": (
        "images/a.jpg images/x/b.jpg annotations/masks/a.png annotations/masks/x/b.png",
        {"a": "annotations.masks.png jpg", "x/b": "annotations.masks.png jpg"},
    ),
    "nested folders": ("images/x/a.jpg masks/x/a.png images/x/a.json", {"x/a": "jpg json masks.png"}),
    "dots": ("a.jpg a.mask.png b.jpg b.mask.png notes.txt README.v2.md", {"a": "jpg mask.png"}),
    "dots in classes": ("c/a.jpg c/a.mask.png c/a.JSON", {"c/a": "cls jpg json mask.png"}),
}


@pytest.mark.parametrize(("names", "some"), PAIRS.values(), ids=PAIRS.keys())
def test_pairs_become_fields_of_one_sample(tmp_path: Path, names: str, some: dict[str, str]) -> None:
    write(tmp_path / "in", [*names.split(), *(["masks/notes.md"] if "images/a.jpg" in names else [])])
    manifest = shardio.pack(tmp_path / "in", tmp_path / "out", layout="pairs")
    found = {key: " ".join(fields) for key, fields in fields_of(tmp_path / "out").items()}
    assert found == {**found, **some}
    assert manifest.num_samples == len(found) == names.count(".jpg")
    assert manifest.classes == (("c",) if names.startswith("c/") else ())
    companion = next(field for field in next(iter(some.values())).split() if "mask" in field)
    image, mask = shardio.ShardMapDataset(tmp_path / "out", fields=("image", companion), decoders={companion: bytes})[0]
    assert image.shape == (3, 32, 48)
    first_mask = next(name for name in names.split() if "mask" in name.lower())
    assert mask == (tmp_path / "in" / first_mask).read_bytes() or len(found) > 1


@pytest.mark.parametrize("mask", ["bridge.png", "bridge_mask.png", "bridge_other.png"])
def test_incomplete_or_differently_named_masks_are_recognized(tmp_path: Path, mask: str) -> None:
    write(tmp_path / "in", [*folders("img"), f"mask/{mask}"])
    assert_refused(r"img/ and mask/: .* two files for each sample", tmp_path / "in")
    assert_refused(r"has no 'mask' file, but 1 of 4|holds no pairs", tmp_path / "in", layout="pairs")


INCOMPLETE = {
    "images/a.jpg images/b.jpg masks/a.png": "in/images/b.jpg has no 'masks' file, but 1 of 2",
    "a.jpg a.mask.png b.jpg": "in/b.jpg has no 'mask' file, but 1 of 2",
    "images/a.jpg masks/a_other.png": "holds no pairs: the files of a sample must have matching names",
    "c/a.jpg d/a.jpg": "or a.jpg and a.mask.png",
    "a.jpg a.mask.png b.mask.png": "in/b.mask.png has a dot in its stem",
    "images/a.jpg photos/a.jpg masks/a.png": "named like folders of images (images, photos)",
}


@pytest.mark.parametrize(("names", "words"), INCOMPLETE.items(), ids=str)
def test_incomplete_pairs_are_refused(tmp_path: Path, names: str, words: str) -> None:
    write(tmp_path / "in", names.split())
    assert_refused(re.escape(words), tmp_path / "in", layout="pairs")


def test_renaming_dots_does_not_split_pairs(tmp_path: Path) -> None:
    write(tmp_path / "in", [f"{name}{end}" for name in LETTERS for end in (".jpg", ".mask.png")])
    for rename_dots in (False, True):
        assert_refused(r"--layout pairs", tmp_path / "in", rename_dots=rename_dots)
    assert_refused("--layout flat --rename-dots", tmp_path / "in", layout="flat")
    assert shardio.pack(tmp_path / "in", tmp_path / "two", rename_dots=True, layout="flat").num_samples == 8
    assert shardio.pack(tmp_path / "in", tmp_path / "one", layout="pairs").num_samples == 4


def test_renaming_dots_packs_names_with_dots_that_are_not_pairs(tmp_path: Path) -> None:
    for number, more in enumerate((["bridge.1.jpg", "bridge.2.jpg", "wall.1.jpg"], ["wall.edited.jpg"], ["v1.0.jpg"])):
        source = write(tmp_path / f"in-{number}", [*folders("c"), *(f"c/{name}" for name in more)])
        assert shardio.pack(source, tmp_path / f"out-{number}", rename_dots=True).num_samples == 4 + len(more)


@pytest.mark.parametrize("as_path", [False, True])
def test_urls_are_no_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_path: bool) -> None:
    monkeypatch.chdir(tmp_path)
    for url, command in (
        ("s3://b/some where", "aws s3 sync"),
        ("gs://b/out", "gcloud storage rsync --recursive"),
        ("https://x.org/images", "#"),
        ("file:///data", "#"),
    ):
        name = Path(url) if as_path else url
        message = assert_refused(re.escape(f"{url.replace(':///', '://')} is a URL"), name, "out")
        assert f"\n  {command}" in message
        assert "\n  shardio pack " in message
        assert run("pack", url, "out", code=None).exit_code != 0
    assert not list(tmp_path.iterdir())


def test_cityscapes_becomes_samples_with_the_bytes_of_all_files(tmp_path: Path) -> None:
    source = write(tmp_path / "in", CITYSCAPES)
    shardio.pack(source, tmp_path / "out", layout="pairs", source_split="train")
    samples = read_packed(tmp_path / "out")
    assert set(samples) == {f"train/{city}/{city}_{number}" for city in ("aachen", "ulm") for number in range(2)}
    for key, fields in samples.items():
        image, labels = (source / f"{top}/{key}_{top}" for top in ("leftImg8bit", "gtFine"))
        assert fields == {"png": image.with_name(f"{image.name}.png").read_bytes()} | {
            f"gtfine_{kind.lower()}": labels.with_name(f"{labels.name}_{kind}").read_bytes()
            for kind in ("color.png", "labelIds.png", "polygons.json")
        }


def test_masks_of_a_split_are_not_a_class(tmp_path: Path) -> None:
    write(tmp_path / "in", ["train/a.jpg", "train/b.jpg", "train_masks/a_mask.png", "train_masks/b_mask.png"])
    assert_refused(r"holds train/ and train_masks/: .* rename train/ to images/", tmp_path / "in")
    (tmp_path / "in" / "train").rename(tmp_path / "in" / "images")
    (tmp_path / "in" / "train_masks").rename(tmp_path / "in" / "masks")
    shardio.pack(tmp_path / "in", tmp_path / "out", layout="pairs")
    assert fields_of(tmp_path / "out") == {name: ["jpg", "masks.png"] for name in ("a", "b")}


ORPHANS = {
    "in folders": ["images/a.jpg", "masks/a.png", "masks/b.png", "masks/c/d.tif"],
    "by name": ["a.jpg", "a.caption.txt", "b.caption.txt", "c/d.caption.txt"],
    "many": ["images/a.jpg", "masks/a.png", *(f"masks/{number}.png" for number in range(100))],
}


@pytest.mark.parametrize("names", ORPHANS.values(), ids=ORPHANS)
def test_the_error_names_companions_whose_image_is_missing(tmp_path: Path, names: list[str]) -> None:
    source = write(tmp_path / "in", names)
    message = assert_refused(f"{len(names) - 2} files belong to images that are missing", source, layout="pairs")
    orphans = [source / name for name in names[2:]]
    assert sum(f"{path} " in f"{message} ".replace("\n", " ") for path in orphans) == min(len(orphans), 20)
    assert ("and 80 more" in message) == (len(orphans) == 100)
    for path in orphans:
        path.unlink()
    assert shardio.pack(source, tmp_path / "out", layout="pairs").num_samples == 1


def test_each_remedy_is_named_once(tmp_path: Path) -> None:
    stems = [f"{number:03d}" for number in range(30)]
    write(tmp_path / "in", [*(f"{stem}{end}" for stem in stems for end in (".jpg", ".mask.png")), "v1.0.jpg"])
    *problems, more, first, second = assert_refused("dot in its stem", tmp_path / "in").splitlines()
    assert problems == [
        f"{tmp_path}/in/{stem}.mask.png has a dot in its stem, and the part before the dot is the name of an image in "
        "the same folder"
        for stem in stems[:20]
    ]
    assert more == "and 11 more"
    assert first.startswith("To make such files fields of one sample, pass --layout pairs (layout='pairs'). ")
    assert "pass --rename-dots (rename_dots=True)" in second


VOC = [
    *(f"JPEGImages/{name}.jpg" for name in "abcd"),
    *(f"Annotations/{name}.xml" for name in "abc"),
    *(f"SegmentationClass/{name}.png" for name in "bcx"),
    "ImageSets/Main/train.txt",
]


def test_annotations_for_some_of_the_images(tmp_path: Path) -> None:
    source = write(tmp_path / "in", VOC)
    assert_refused(r"--layout pairs", source)
    assert_refused(r"--on-incomplete skip \(on_incomplete='skip'\).* --on-incomplete keep", source, layout="pairs")
    with pytest.raises(ValueError, match="applies only to --layout pairs"):
        shardio.pack(source, tmp_path / "out", on_incomplete="skip")
    both = {"jpg", "annotations.xml", "segmentationclass.png"}
    some = {"a": {"jpg", "annotations.xml"}, "b": both, "c": both, "d": {"jpg"}}
    expected: dict[OnIncomplete, dict[str, set[str]]] = {"skip": {"b": both, "c": both}, "keep": some}
    for choice, fields in expected.items():
        result = pack(source, tmp_path / choice, layout="pairs", on_incomplete=choice)
        found = read_packed(tmp_path / choice)
        assert {key: set(sample) for key, sample in found.items()} == fields
        for key, sample in found.items():
            for field, content in sample.items():
                folder = {"jpg": "JPEGImages", "annotations.xml": "Annotations"}.get(field, "SegmentationClass")
                assert content == (source / folder / f"{key}.{field.rpartition('.')[2]}").read_bytes()
        packed = {name for name in VOC[:-1] if Path(name).stem in fields}
        assert set(result.ignored) == {source / name for name in {*VOC} - packed}
    named = ("key", "segmentationclass.png")
    dataset = shardio.ShardDataset(tmp_path / "keep", fields=named, missing=None, shuffle=False)
    assert {key for key, mask in dataset if mask is None} == {"a", "d"}
