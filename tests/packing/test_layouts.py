"""Sources that do not look like class folders are refused with commands that pack them."""

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


def folders(*names: str, stems: list[str] = LETTERS, suffix: str = "jpg") -> list[str]:
    return [f"{name}/{stem}.{suffix}" for name in names for stem in stems]


# Files in the source, and a part of the error message. The test runs the commands in the message.
AMBIGUOUS = {
    "masks": ([*folders("images"), *folders("masks", suffix="png")], "images/ and masks/"),
    "masks-numbered": (folders("images", "masks", stems=NUMBERS, suffix="png"), "images/ and masks/"),
    "labels": ([*folders("images"), *folders("labels", suffix="txt")], "images/ and labels/"),
    "with-other-folders": (
        [*folders("JPEGImages", "extra"), *folders("Annotations", suffix="xml")],
        "JPEGImages/ and Annotations/",
    ),
    "numbered-with-other-folders": (
        [*folders("images", "masks", stems=NUMBERS), *folders("extra", stems=LETTERS)],
        "images/ and masks/",
    ),
    "masks-of-splits": (["images/train/a.jpg", "images/val/b.jpg", "masks/train/a.png", "masks/val/b.png"], "masks/"),
    "classes-of-splits": (folders("cat/train", "cat/val", "dog/train", "dog/val"), "cat holds train/ and val/"),
    "some-splits": (folders("train", "test", "extra"), "extra/ and test/"),
    "imagenet": (folders("train/cat", "train/dog", "val/cat", "val/dog"), "train/ and val/"),
    "coco": (folders("train2017", "val2017", "test2017"), "train2017/, test2017/ and val2017/"),
    "kaggle": (folders("training_set/cats", "test_set/cats"), "training_set/ and test_set/"),
    "two-domains": (folders("trainA", "trainB", "testA", "testB"), "trainA/, trainB/, testA/ and testB/"),
    "train-alone": (folders("train/cat", "train/dog"), "train/"),
    "cityscapes": (
        [
            f"{top}/{split}/{city}/{city}_{number}_{top}{end}"
            for split, city in (("train", "aachen"), ("train", "ulm"), ("val", "bonn"))
            for number in range(2)
            for top, end in (
                ("leftImg8bit", ".png"),
                ("gtFine", "_labelIds.png"),
                ("gtFine", "_color.png"),
                ("gtFine", "_polygons.json"),
            )
        ],
        "leftImg8bit/ and gtFine/",
    ),
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
    """Run the commands in an error message. If a command is refused, run the commands in its message."""
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
    source, out = tmp_path / "in it", tmp_path / "out"
    write(source, names)
    caught = assert_raises(PackError, None, shardio.pack, source, out)
    message = str(caught)
    assert words in message
    assert not out.exists()
    follow(message)


def test_layout_classes_makes_each_folder_a_class(tmp_path: Path) -> None:
    for name, (names, _) in AMBIGUOUS.items():
        images = [path for path in names if not path.endswith((".json", ".txt", ".xml"))]
        write(tmp_path / name, images)
        manifest = shardio.pack(tmp_path / name, tmp_path / "out" / name, layout="classes", source_split="all")
        assert manifest.classes == tuple(sorted({path.split("/")[0] for path in images}))
        assert manifest.num_samples == len(images)


SPLIT_SOURCES: dict[str, tuple[str, dict[str, Any], str]] = {
    "pairs": (
        "images/train/a.jpg images/train/b.jpg images/val/a.jpg "
        "labels/train/a.txt labels/train/b.txt labels/val/a.txt labels/classes.txt",
        {"layout": "pairs"},
        "train/a train/b val/a",
    ),
    "flat": ("train/a.jpg train/b.jpg val/a.jpg", {"layout": "flat"}, "train/a train/b val/a"),
    "deep": (
        "x/480p/train/a.jpg x/480p/train/b.jpg x/480p/test/a.jpg",
        {"layout": "flat"},
        "x/480p/train/a x/480p/train/b x/480p/test/a",
    ),
    **{
        name: (
            "cat/train/a.jpg dog/train/b.jpg cat/test/a.jpg dog/test/b.jpg",
            options,
            "cat/train/a dog/train/b cat/test/a dog/test/b",
        )
        for name, options in (("classes", {}), ("chosen classes", {"layout": "classes"}))
    },
}
"""Files, options, and the expected keys of all splits."""


@pytest.mark.parametrize(("names", "options", "keys"), SPLIT_SOURCES.values(), ids=SPLIT_SOURCES)
@pytest.mark.parametrize("labeled", [False, True])
def test_splits_are_packed_apart_unless_chosen(
    tmp_path: Path, names: str, options: dict[str, Any], keys: str, labeled: bool
) -> None:
    source, out, all_keys = write(tmp_path / "in", names.split()), tmp_path / "out it", keys.split()
    if labeled:
        (tmp_path / "labels.csv").write_text("key,label\n" + "".join(f"{key},1\n" for key in sorted(all_keys)))
        options = options | {"labels": tmp_path / "labels.csv"}
    with pytest.raises(PackError, match="look like the splits of a dataset, but would be packed as one") as caught:
        shardio.pack(source, out, **options)
    assert not out.exists()
    follow(str(caught.value))
    for path in sorted(out.iterdir()):
        assert set(fields_of(path)) == {key for key in all_keys if path.name in key.split("/")}
        assert "cls" not in next(iter(fields_of(path).values())) or labeled or names.startswith("cat")
    shardio.pack(source, tmp_path / "all", source_split="all", **options)
    assert set(fields_of(tmp_path / "all")) == set(all_keys)


def test_a_split_must_be_there_and_must_not_be_a_class(tmp_path: Path) -> None:
    write(tmp_path / "in", folders("train/cat", "val/cat", "train/dog"))
    with pytest.raises(PackError, match=r"has the name 'dev' \(--source-split\): .* splits train/ and val/"):
        shardio.pack(tmp_path / "in", tmp_path / "out", source_split="dev")
    for layout in ("auto", "classes"):
        with pytest.raises(PackError, match=r"\n  shardio pack \S+/in/train ") as caught:
            shardio.pack(tmp_path / "in", tmp_path / layout, source_split="train", layout=layout)
        follow(str(caught.value))
    assert_raises(ValueError, "source_split", shardio.pack, tmp_path / "in", tmp_path / "out", source_split="")


def test_dotted_pairs_of_splits_do_not_become_classes(tmp_path: Path) -> None:
    write(tmp_path / "in", [f"{split}/{name}" for split in ("train", "val") for name in ("a.jpg", "a.mask.png")])
    with pytest.raises(PackError, match="look like the splits of a dataset, not classes") as caught:
        shardio.pack(tmp_path / "in", tmp_path / "out", layout="pairs", source_split="all")
    follow(str(caught.value))
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


PAIRS = {
    "folders": ("images/a.jpg images/b.jpg masks/a.png masks/b.png", {"a": "jpg masks.png"}),
    "two companions": ("images/a.jpg Masks/a.png labels/a.txt", {"a": "jpg labels.txt masks.png"}),
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
    "dots": ("a.jpg a.mask.png b.jpg b.mask.png", {"a": "jpg mask.png"}),
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
    "images/a.jpg photos/a.jpg masks/a.png": "named like a folder of images (images, photos)",
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


@pytest.mark.parametrize("more", [["bridge.1.jpg", "bridge.2.jpg", "wall.1.jpg"], ["wall.edited.jpg"], ["v1.0.jpg"]])
def test_renaming_dots_packs_names_with_dots_that_are_not_pairs(tmp_path: Path, more: list[str]) -> None:
    write(tmp_path / "in", [*folders("c"), *(f"c/{name}" for name in more)])
    assert shardio.pack(tmp_path / "in", tmp_path / "out", rename_dots=True).num_samples == 4 + len(more)


def test_layout_flat_packs_any_folders_without_classes(tmp_path: Path) -> None:
    write(tmp_path / "in", ["a.jpg", "x/a.jpg", "x/y/b.jpg", "x/y/b.cls"])
    manifest = shardio.pack(tmp_path / "in", tmp_path / "out", layout="flat")
    assert (manifest.classes, sorted(fields_of(tmp_path / "out"))) == ((), ["a", "x/a", "x/y/b"])


@pytest.mark.parametrize(
    ("url", "command"),
    [
        ("s3://b/some where", "aws s3 sync"),
        ("gs://b/out", "gcloud storage rsync --recursive"),
        ("https://x.org/images", "#"),
        ("file:///data", "#"),
    ],
)
@pytest.mark.parametrize("as_path", [False, True])
def test_urls_are_no_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, command: str, as_path: bool
) -> None:
    write(tmp_path / "in", folders("cats"))
    monkeypatch.chdir(tmp_path)
    name: Any = Path(url) if as_path else url
    caught = assert_raises(PackError, re.escape(f"{url.replace(':///', '://')} is a URL"), shardio.pack, name, "out")
    assert f"\n  {command}" in str(caught)
    assert "\n  shardio pack " in str(caught)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    assert run("pack", url, "out", code=None).exit_code != 0
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_cityscapes_becomes_samples_with_the_bytes_of_all_files(tmp_path: Path) -> None:
    source = write(tmp_path / "in", AMBIGUOUS["cityscapes"][0])
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
}


@pytest.mark.parametrize("names", ORPHANS.values(), ids=ORPHANS)
def test_the_error_names_companions_whose_image_is_missing(tmp_path: Path, names: list[str]) -> None:
    write(tmp_path / "in", names)
    with pytest.raises(PackError, match="2 files belong to images that are missing") as caught:
        shardio.pack(tmp_path / "in", tmp_path / "out", layout="pairs")
    assert all(f"{tmp_path}/in/{name}" in str(caught.value) for name in names[2:])
    assert not (tmp_path / "out").exists()
    for name in names[2:]:
        (tmp_path / "in" / name).unlink()
    assert shardio.pack(tmp_path / "in", tmp_path / "out", layout="pairs").num_samples == 1


def test_the_error_counts_companions_that_it_does_not_name(tmp_path: Path) -> None:
    write(tmp_path / "in", ["images/a.jpg", *(f"masks/{name}.png" for name in ("a", *range(100)))])
    with pytest.raises(PackError, match="100 files belong to images that are missing") as caught:
        shardio.pack(tmp_path / "in", tmp_path / "out", layout="pairs")
    assert len(str(caught.value).splitlines()) < 25
    assert "and 80 more" in str(caught.value)


@pytest.mark.parametrize(
    "names",
    [
        ["images/a.jpg", "masks/a.png", "masks/README.md", "README"],
        ["images/a.jpg", "labels/a.txt", "labels/classes.txt"],
        ["a.jpg", "a.mask.png", "notes.txt", "README.v2.md"],
    ],
)
def test_files_that_are_not_companions_are_ignored_among_pairs(tmp_path: Path, names: list[str]) -> None:
    write(tmp_path / "in", names)
    assert shardio.pack(tmp_path / "in", tmp_path / "out", layout="pairs").num_samples == 1


def test_each_remedy_is_named_once(tmp_path: Path) -> None:
    stems = [f"{number:03d}" for number in range(30)]
    write(tmp_path / "in", [*(f"{stem}{end}" for stem in stems for end in (".jpg", ".mask.png")), "v1.0.jpg"])
    caught = assert_raises(PackError, None, shardio.pack, tmp_path / "in", tmp_path / "out")
    *problems, more, first, second = str(caught).splitlines()
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
