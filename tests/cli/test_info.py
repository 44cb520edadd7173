from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import shardio
from shardio.cli import look
from shardio.cli.main import app
from shardio.images.kernel import finding
from shardio.shards import open_table
from shardio.transforms import Resize
from shardio.values import format_bytes
from tests.processes import run_python
from tests.sources import write_images, write_mixed
from tests.tars import write_tar

BY_KERNEL = "by the kernel (by libjpeg-turbo if a crop has more than a million pixels, or without a crop)"


def run_process(*arguments: object) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "shardio", *arguments)


def info(*arguments: object) -> Result:
    done = CliRunner().invoke(app, ["info", *map(str, arguments)])
    assert done.exit_code == 0, done.stderr
    return done


def test_info_shows_what_a_dataset_contains(packed: Path) -> None:
    done = run_process("info", packed)
    assert (done.returncode, done.stderr) == (0, "")
    rows = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert rows["samples"] == "21"
    assert rows["shards"] == "5, 1 to 5 samples each"
    assert rows["classes"] == "3: class-0, class-1, class-2"
    assert rows["fields"] == "cls, jpg"
    assert rows["digest"] == open_table(packed).manifest.digest
    assert "max_shard_samples 5" in rows["packed"]
    assert rows["size"].endswith(" per sample")
    assert rows["decoders"] == f"21 {BY_KERNEL}"


def test_equal_shards_are_not_shown_as_a_range(images: Path, tmp_path: Path) -> None:
    shardio.pack(images, tmp_path, max_shard_samples=7)
    assert "shards   3, 7 samples each\n" in info(tmp_path).stdout


def test_json_contains_everything(packed: Path) -> None:
    done = run_process("info", packed, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == {
        "samples": 21,
        "shards": 5,
        "classes": ["class-0", "class-1", "class-2"],
        "fields": ["cls", "jpg"],
        "bytes": sum(path.stat().st_size for path in packed.glob("*.tar")),
        "samples_per_shard": {"min": 1, "mean": 4.2, "max": 5},
        "digest": open_table(packed).manifest.digest,
        "tiled": 0,
        "decoded": {
            "samples": 21,
            "kernel": 21,
            "libjpeg": 0,
            "pillow": 0,
            "unreadable": 0,
            "reasons": {"libjpeg": {}, "pillow": {}},
            "clipped": {},
            "no_kernel": None,
        },
        "format": 1,
        "pack": json.loads((packed / "shardio.json").read_bytes())["pack"],
    }


def test_a_manifest_and_its_directory_are_the_same_dataset(packed: Path) -> None:
    assert info(packed / "shardio.json").stdout == info(packed).stdout


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mixed")
    write_mixed(root / "images")
    shardio.pack(root / "images", root / "shards", max_shard_samples=5)
    return root / "shards"


def decoded(source: Path) -> str:
    """Return the decoders that info shows."""
    return dict(line.split(maxsplit=1) for line in info(source).stdout.splitlines())["decoders"]


def test_info_shows_the_decoders_and_why_the_kernel_does_not_decode(mixed: Path) -> None:
    by_others = "2 by libjpeg-turbo (2 × progressive); 3 by Pillow (2 × PNG, 1 × 4 components)"
    assert decoded(mixed) == f"7 {BY_KERNEL}; {by_others}"
    found = json.loads(info(mixed, "--json").stdout)["decoded"]
    assert [found[name] for name in ("samples", "kernel", "libjpeg", "pillow", "unreadable")] == [12, 7, 2, 3, 0]
    assert found["reasons"] == {"libjpeg": {"progressive": 2}, "pillow": {"PNG": 2, "4 components": 1}}


def test_the_forecast_equals_what_the_loader_counts(mixed: Path) -> None:
    """Of a loader that crops or resizes: whole images are left to libjpeg-turbo."""
    loader = shardio.DataLoader(shardio.ShardDataset(mixed, transform=Resize((20, 20))), batch_size=4)
    list(loader)
    found, stats = json.loads(info(mixed, "--json").stdout)["decoded"], loader.stats()
    assert found["kernel"] == stats.num_images_by_decoder["kernel"]
    assert found["libjpeg"] == stats.num_images_by_decoder["libjpeg"]
    assert found["pillow"] == stats.num_images_by_decoder["pillow"]


@pytest.mark.parametrize(
    ("missing", "why"),
    [("numba", "shardio was built without it for this processor"), (None, "it is n")],
)
def test_without_a_kernel_libjpeg_decodes_its_images(
    mixed: Path, missing: str | None, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finding, "load_functions", lambda: None)
    monkeypatch.setattr(finding, "_finder", finding._Finder())
    if missing:
        monkeypatch.setitem(sys.modules, missing, None)
    by_libjpeg = "9 by libjpeg-turbo (7 × no kernel, 2 × progressive)"
    expected = f"{by_libjpeg}; 3 by Pillow (2 × PNG, 1 × 4 components); no kernel because "
    assert decoded(mixed).startswith(expected + why)


@pytest.mark.parametrize("num_samples", [1, 5, 11])
def test_from_many_samples_a_few_are_examined_and_info_says_so(
    mixed: Path, num_samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(look, "MAX_SAMPLES", num_samples)
    assert decoded(mixed).startswith(f"of {num_samples} evenly spaced sample{'s' * (num_samples > 1)}, ")
    found = json.loads(info(mixed, "--json").stdout)["decoded"]
    assert found["samples"] == num_samples
    assert sum(found[name] for name in ("kernel", "libjpeg", "pillow", "unreadable")) == num_samples


def test_files_that_are_not_images_are_unreadable(tmp_path: Path) -> None:
    write_tar(tmp_path / "x.tar", [("a.jpg", b"1"), ("b.jpg", b""), ("c.png", b"\xff\xd8\xff"), ("d.cls", b"0")])
    assert decoded(tmp_path) == "3 unreadable"
    write_tar(tmp_path / "y.tar", [("a.cls", b"0")])
    assert decoded(tmp_path / "y.tar") == "no images"


def test_a_manifest_without_its_shards_provides_the_other_rows(mixed: Path, tmp_path: Path) -> None:
    (tmp_path / "shardio.json").write_bytes((mixed / "shardio.json").read_bytes())
    assert decoded(tmp_path).startswith("unknown: ")
    assert json.loads(info(tmp_path, "--json").stdout)["decoded"] is None


def test_many_classes_are_abbreviated(tmp_path: Path) -> None:
    write_images(tmp_path / "in", classes=10, per_class=1)
    shardio.pack(tmp_path / "in", tmp_path / "out")
    shown = next(line for line in info(tmp_path / "out").stdout.splitlines() if line.startswith("classes"))
    assert shown == f"classes  10: {', '.join(f'class-{i}' for i in range(8))}, …"
    assert len(json.loads(info(tmp_path / "out", "--json").stdout)["classes"]) == 10


def test_foreign_tars_have_no_pack_settings(tmp_path: Path) -> None:
    write_tar(tmp_path / "x.tar", [("a.jpg", b"1"), ("a.cls", b"0")])
    for source in tmp_path, tmp_path / "x.tar":
        rows = dict(line.split(maxsplit=1) for line in info(source).stdout.splitlines())
        assert (rows["samples"], rows["packed"], rows["classes"]) == ("1", "unknown: there is no manifest", "0")


@pytest.mark.parametrize("name", ["nothing", "nothing.tar", "nothing.json", "empty"])
def test_a_source_that_is_not_a_dataset_is_an_error_of_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    done = run_process("info", tmp_path / name)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ")
    assert str(tmp_path / name) in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_damaged_manifest_is_an_error_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "shardio.json").write_bytes(b"{")
    done = run_process("info", tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: the manifest {tmp_path}/shardio.json cannot be read")


@pytest.mark.parametrize("arguments", [[], ["a", "b"], ["a", "--no-such-option"]], ids=" ".join)
def test_wrong_usage_has_exit_code_2(arguments: list[str]) -> None:
    done = run_process("info", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Usage" in done.stderr


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (3 * 2**30, "3 GiB"), (2**41, "2 TiB")],
)
def test_sizes_are_shown_in_binary_units(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text
