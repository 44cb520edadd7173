"""Which directories can be packed, and how each file in them is packed."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

import shardio
from shardio.libraries import import_torchvision
from shardio.packing import PackResult, PackSettings, SourceOptions, pack_source
from tests.sources import encode, write_images
from tests.tars import by_key, read_with_webdataset


def write(root: Path, *names: str) -> None:
    """Write a file under each name: an image if the suffix is an image's, otherwise a text."""
    for i, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        suffix = path.suffix[1:].lower().replace("tiff", "tif")
        is_image = suffix in ("jpg", "jpeg", "png", "webp", "bmp", "tif")
        path.write_bytes(encode(i, suffix=suffix) if is_image else name.encode())


def pack(root: Path) -> tuple[dict[str, dict[str, bytes]], PackResult]:
    """Pack ``root/in``; return the samples that WebDataset reads, and the result."""
    settings = PackSettings(max_shard_size=1 << 30, max_shard_samples=None, shuffle_seed=0)
    result = pack_source(root / "in", root / "out", settings)
    return dict(read_with_webdataset(root / "out" / "shard-000000.tar")), result


def test_the_top_folder_is_the_class_however_deep_the_images_are(tmp_path: Path) -> None:
    write(tmp_path / "in", "cats/1.jpg", "cats/a/b/c/2.jpg", "dogs/x/1.jpg", "Bees/1.jpg")
    samples, result = pack(tmp_path)
    assert result.manifest.classes == ("Bees", "cats", "dogs")
    assert {key: fields["cls"] for key, fields in samples.items()} == {
        "Bees/1": b"0",
        "cats/1": b"1",
        "cats/a/b/c/2": b"1",
        "dogs/x/1": b"2",
    }


def test_a_flat_directory_has_no_labels(tmp_path: Path) -> None:
    write(tmp_path / "in", "1.jpg", "2.png")
    samples, result = pack(tmp_path)
    assert result.manifest.classes == ()
    assert {key: sorted(fields) for key, fields in samples.items()} == {"1": ["jpg"], "2": ["png"]}


def test_a_flat_directory_may_have_label_files(tmp_path: Path) -> None:
    write(tmp_path / "in", "1.jpg", "1.cls")
    samples, _ = pack(tmp_path)
    assert samples["1"]["cls"] == b"1.cls"


@pytest.mark.parametrize("suffix", ["jpg", "jpeg", "png", "webp", "bmp", "tif", "tiff"])
def test_image_suffixes_are_recognised_in_any_letter_case(tmp_path: Path, suffix: str) -> None:
    names = [suffix, suffix.upper(), suffix.title()]
    write(tmp_path / "in", *(f"c/{i}.{name}" for i, name in enumerate(names)))
    samples, result = pack(tmp_path)
    assert {key: set(fields) for key, fields in samples.items()} == {f"c/{i}": {suffix, "cls"} for i in range(3)}
    assert (result.mislabelled, result.rejected, result.ignored) == ([], [], [])
    for i, name in enumerate(names):
        assert samples[f"c/{i}"][suffix] == (tmp_path / "in" / "c" / f"{i}.{name}").read_bytes()


def test_files_with_the_same_stem_are_further_fields(tmp_path: Path) -> None:
    write(tmp_path / "in", "c/a.jpg", "c/a.json", "c/a.TXT", "c/b.jpg")
    samples, _ = pack(tmp_path)
    assert {key: sorted(fields) for key, fields in samples.items()} == {
        "c/a": ["cls", "jpg", "json", "txt"],
        "c/b": ["cls", "jpg"],
    }
    assert samples["c/a"]["json"] == b"c/a.json"


def test_hidden_files_and_folders_are_skipped(tmp_path: Path) -> None:
    write(tmp_path / "in", "c/a.jpg", "c/.b.jpg", ".git/x.jpg", "c/.cache/y.jpg", ".DS_Store", "c/._a.jpg")
    samples, result = pack(tmp_path)
    assert list(samples) == ["c/a"]
    assert result.ignored == []


def test_files_without_an_image_are_ignored_and_reported(tmp_path: Path) -> None:
    odd = ["c/notes.txt", "c/Thumbs.db", "README", "c/a.seg.json", "LICENSE.md", "c/jpg"]
    write(tmp_path / "in", "c/a.jpg", *odd)
    samples, result = pack(tmp_path)
    assert {key: sorted(fields) for key, fields in samples.items()} == {"c/a": ["cls", "jpg"]}
    assert sorted(result.ignored) == sorted(tmp_path / "in" / name for name in odd)


def test_a_file_without_a_suffix_is_not_a_field(tmp_path: Path) -> None:
    write(tmp_path / "in", "c/a.jpg", "c/a")
    samples, result = pack(tmp_path)
    assert sorted(samples["c/a"]) == ["cls", "jpg"]
    assert result.ignored == [tmp_path / "in" / "c" / "a"]


def test_links_to_images_are_packed_as_images(tmp_path: Path) -> None:
    write(tmp_path / "store", "1.jpg")
    (tmp_path / "in" / "c").mkdir(parents=True)
    (tmp_path / "in" / "c" / "a.jpg").symlink_to(tmp_path / "store" / "1.jpg")
    samples, _ = pack(tmp_path)
    assert samples["c/a"]["jpg"] == (tmp_path / "store" / "1.jpg").read_bytes()


def test_an_image_whose_format_does_not_match_its_suffix_is_packed_and_reported(tmp_path: Path) -> None:
    write(tmp_path / "in", "c/a.jpg")
    odd = tmp_path / "in" / "c" / "b.jpg"
    odd.write_bytes(encode(1, suffix="png"))
    samples, result = pack(tmp_path)
    assert samples["c/b"]["jpg"] == odd.read_bytes()
    assert [(problem.path, problem.what) for problem in result.mislabelled] == [
        (odd, "has the suffix .jpg but is in PNG format")
    ]
    assert result.rejected == []


@pytest.mark.parametrize("content", [b"", b"<html>404</html>", bytes(5000)], ids=["empty", "html", "zeros"])
def test_a_file_that_is_not_an_image_is_left_out_and_reported(tmp_path: Path, content: bytes) -> None:
    write(tmp_path / "in", "c/a.jpg", "c/b.json")
    odd = tmp_path / "in" / "c" / "b.jpg"
    odd.write_bytes(content)
    samples, result = pack(tmp_path)
    assert list(samples) == ["c/a"]
    assert result.rejected == [("c/b", "c/b.jpg", "is not an image")]
    assert result.mislabelled == []


def test_pack_warns_about_each_file_that_does_not_match_its_suffix(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "in", "c/a.jpg")
    (tmp_path / "in" / "c" / "b.jpg").write_bytes(encode(1, suffix="png"))
    (tmp_path / "in" / "c" / "d.jpg").write_bytes(b"no image")
    with caplog.at_level(logging.WARNING):
        shardio.pack(tmp_path / "in", tmp_path / "out")
    assert caplog.messages == [
        f"{tmp_path}/in/c/b.jpg has the suffix .jpg but is in PNG format: packed anyway",
        f"{tmp_path}/in: c/d.jpg is not an image: left out",
    ]


def test_pack_counts_images_in_unsupported_formats(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    suffixes = ["arw", "cr2", "cr3", "dng", "heic", "heif", "hif", "jpf", "jpx", "jxl", "nef", "svg"]
    write(tmp_path / "in", "c/a.jpg", "c/x.HEIC", "c/notes.txt", *(f"c/{suffix}.{suffix}" for suffix in suffixes))
    with caplog.at_level(logging.WARNING):
        shardio.pack(tmp_path / "in", tmp_path / "out")
    counts = ", ".join(f"{1 + (suffix == 'heic')} .{suffix}" for suffix in suffixes)
    assert [message.partition("): ")[0] for message in caplog.messages] == [
        f"{tmp_path}/in: left out images in other formats ({counts}"
    ]


ORPHANS = {
    "in folders": ["images/a.jpg", "masks/a.png", "masks/b.png", "masks/c/d.tif"],
    "by name": ["a.jpg", "a.caption.txt", "b.caption.txt", "c/d.caption.txt"],
}


@pytest.mark.parametrize("names", ORPHANS.values(), ids=ORPHANS)
def test_the_error_names_companions_whose_image_is_missing(tmp_path: Path, names: list[str]) -> None:
    write(tmp_path / "in", *names)
    with pytest.raises(shardio.PackError, match="2 files belong to images that are missing") as caught:
        shardio.pack(tmp_path / "in", tmp_path / "out", layout="pairs")
    assert all(f"{tmp_path}/in/{name}" in str(caught.value) for name in names[2:])
    assert not (tmp_path / "out").exists()
    for name in names[2:]:
        (tmp_path / "in" / name).unlink()
    assert shardio.pack(tmp_path / "in", tmp_path / "out", layout="pairs").num_samples == 1


def test_the_error_counts_companions_that_it_does_not_name(tmp_path: Path) -> None:
    write(tmp_path / "in", "images/a.jpg", *(f"masks/{name}.png" for name in ("a", *range(100))))
    with pytest.raises(shardio.PackError, match="100 files belong to images that are missing") as caught:
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
    write(tmp_path / "in", *names)
    assert shardio.pack(tmp_path / "in", tmp_path / "out", layout="pairs").num_samples == 1


def test_dots_in_stems_become_underscores_on_request(tmp_path: Path) -> None:
    write(tmp_path / "in", "v1.0/a.b.c.jpg", "v1.0/a.b.c.json", "v1.0/d.jpg")
    shardio.pack(tmp_path / "in", tmp_path / "out", rename_dots=True)
    samples = dict(read_with_webdataset(tmp_path / "out" / "shard-000000.tar"))
    assert {key: sorted(fields) for key, fields in samples.items()} == {
        "v1.0/a_b_c": ["cls", "jpg", "json"],
        "v1.0/d": ["cls", "jpg"],
    }


def test_a_class_with_only_broken_images_keeps_its_label(tmp_path: Path) -> None:
    write_images(tmp_path / "in", classes=3, per_class=1)
    (tmp_path / "in" / "class-1" / "name-000.jpg").write_bytes(b"broken")
    samples, result = pack(tmp_path)
    assert result.manifest.classes == ("class-0", "class-1", "class-2")
    assert {key: fields["cls"] for key, fields in samples.items()} == {
        "class-0/name-000": b"0",
        "class-2/name-000": b"2",
    }


def test_images_that_differ_in_the_suffix_are_samples(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As torchvision's ImageFolder takes them."""
    names = ["c/a.JPG", "c/a.jpg", "c/b.jpeg", "c/b.jpg", "c/b.png", "c/d.jpg", "d/a.jpg"]
    write(tmp_path / "in", *names)
    shardio.pack(tmp_path / "in", tmp_path / "out")
    samples = dict(read_with_webdataset(tmp_path / "out" / "shard-000000.tar"))
    keys = ["c/a_JPG", "c/a_jpg", "c/b_jpeg", "c/b_jpg", "c/b_png", "c/d", "d/a"]
    assert sorted(samples) == keys
    import_torchvision()  # Also where its compiled part does not load.
    expected = pytest.importorskip("torchvision.datasets").ImageFolder(str(tmp_path / "in"))
    for key, (path, label) in zip(keys, sorted(expected.samples), strict=True):
        suffix = Path(path).suffix[1:].lower()
        assert samples[key] == {suffix: Path(path).read_bytes(), "cls": str(label).encode()}
    assert len(shardio.ShardDataset(tmp_path / "out", fields=("image", "label"))) == len(names)
    (message,) = caplog.messages
    assert "5 images have the same name as another, apart from the suffix" in message
    assert "such as 'c/a_JPG'" in message


def test_images_that_differ_in_the_suffix_have_labels_of_their_own(tmp_path: Path) -> None:
    """In a directory, a file of labels names them by paths. So does a table of paths."""
    names = ["x/a.jpg", "x/a.png", "x/b.c.jpg"]
    write(tmp_path / "in", *names)
    lines = [f"{name},{number}" for number, name in enumerate(names)]
    (tmp_path / "labels.csv").write_text("\n".join(["file,label", *lines]))
    options: dict[str, Any] = {"labels": tmp_path / "labels.csv", "rename_dots": True, "shuffle_seed": None}
    with pytest.raises(
        shardio.PackError, match=r"a\.png have the same stem\n.*--layout flat \(layout='flat'\)\. If they"
    ):
        shardio.pack(tmp_path / "in", tmp_path / "out", **options)
    shardio.pack(tmp_path / "in", tmp_path / "out", layout="flat", **options)
    expected = [("x/a_jpg", b"0"), ("x/a_png", b"1"), ("x/b_c", b"2")]
    assert [(key, sample["cls"]) for key, sample in by_key(tmp_path / "out" / "shard-000000.tar").items()] == expected
    shutil.copy(tmp_path / "labels.csv", tmp_path / "in" / "table.csv")
    for number, labels in enumerate((tmp_path / "labels.csv", None)):
        shardio.pack(tmp_path / "in" / "table.csv", tmp_path / str(number), **{**options, "labels": labels})
        found = by_key(tmp_path / str(number) / "shard-000000.tar")
        assert [(key, sample["cls"]) for key, sample in found.items()] == expected


def test_each_remedy_is_named_once(tmp_path: Path) -> None:
    stems = [f"{number:03d}" for number in range(30)]
    write(tmp_path / "in", *(f"{stem}{end}" for stem in stems for end in (".jpg", ".mask.png")), "v1.0.jpg")
    with pytest.raises(shardio.PackError) as caught:
        shardio.pack(tmp_path / "in", tmp_path / "out")
    *problems, more, first, second = str(caught.value).splitlines()
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
    """As in Pascal VOC, where few of the images are segmented."""
    write(tmp_path / "in", *VOC)
    with pytest.raises(shardio.PackError, match=r"--layout pairs"):
        shardio.pack(tmp_path / "in", tmp_path / "out")
    with pytest.raises(
        shardio.PackError, match=r"--on-incomplete skip \(on_incomplete='skip'\).* --on-incomplete keep"
    ):
        shardio.pack(tmp_path / "in", tmp_path / "out", layout="pairs")
    settings = PackSettings(max_shard_size=1 << 30)
    results = {
        choice: pack_source(
            tmp_path / "in", tmp_path / choice, settings, SourceOptions(layout="pairs", on_incomplete=choice)
        )
        for choice in ("skip", "keep")
    }
    found = {name: by_key(tmp_path / name / "shard-000000.tar") for name in results}
    both = {"jpg", "annotations.xml", "segmentationclass.png"}
    assert {key: set(sample) for key, sample in found["skip"].items()} == {"b": both, "c": both}
    assert {key: set(sample) for key, sample in found["keep"].items()} == {
        "a": {"jpg", "annotations.xml"},
        "b": both,
        "c": both,
        "d": {"jpg"},
    }
    for choice in found:
        for key, sample in found[choice].items():
            for field, content in sample.items():
                folder = {"jpg": "JPEGImages", "annotations.xml": "Annotations"}.get(field, "SegmentationClass")
                assert content == (tmp_path / "in" / folder / f"{key}.{field.rpartition('.')[2]}").read_bytes()
    used = {"skip": {"b", "c"}, "keep": {"a", "b", "c", "d"}}
    for choice, result in results.items():
        packed = {name for name in VOC[:-1] if Path(name).stem in used[choice]}
        assert set(result.ignored) == {tmp_path / "in" / name for name in {*VOC} - packed}
    with pytest.raises(ValueError, match="applies only to --layout pairs"):
        shardio.pack(tmp_path / "in", tmp_path / "out", on_incomplete="skip")
    dataset = shardio.ShardDataset(
        tmp_path / "keep", fields=("key", "segmentationclass.png"), missing=None, shuffle=False
    )
    assert {key for key, mask in dataset if mask is None} == {"a", "d"}
