"""``shardio info``, ``ls``, ``cat``, ``extract``, ``order`` and ``doctor``."""

from __future__ import annotations

import json
import re
import sys
import tarfile
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import shardio
from shardio import ShardWriter
from shardio.cli import look
from shardio.shards import open_table
from shardio.transforms import Resize
from tests.cli.commands import error_of, run, run_main, usage_error
from tests.faults.proxy import FaultProxy, Script
from tests.files import read_files
from tests.packing.packs import write_files
from tests.pages import Page
from tests.servers.server import Server, upload
from tests.sources import write_images, write_mixed
from tests.tars import read_members, write_tar

BY_KERNEL = "by the kernel (by libjpeg-turbo without a crop)"


def rows_of(source: Path) -> dict[str, str]:
    return dict(line.split(maxsplit=1) for line in run("info", source).stdout.splitlines())


def json_of(source: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(run("info", source, "--json").stdout)
    return values


def test_info_shows_what_a_dataset_contains(images: Path, packed: Path, tmp_path: Path) -> None:
    manifest = open_table(packed).manifest
    rows = rows_of(packed)
    assert (rows["samples"], rows["shards"]) == ("21", "5, 1 to 5 samples each")
    assert (rows["classes"], rows["fields"]) == ("3: class-0, class-1, class-2", "cls, jpg")
    assert rows["digest"] == manifest.digest
    assert "max_shard_samples 5" in rows["packed"]
    assert rows["size"].endswith(" per sample")
    assert (rows["decoders"], rows_of(packed / "shardio.json")) == (f"21 {BY_KERNEL}", rows)
    size = sum(path.stat().st_size for path in packed.glob("*.tar"))
    per_shard = {"min": 1, "mean": 4.2, "max": 5}
    numbers = {"samples": 21, "shards": 5, "bytes": size, "samples_per_shard": per_shard, "tiled": 0, "format": 1}
    decoders = {"samples": 21, "kernel": 21, "libjpeg": 0, "raw": 0, "pillow": 0, "unreadable": 0, "no_kernel": None}
    reasons: dict[str, Any] = {"libjpeg": {}, "raw": {}, "pillow": {}}
    names = {"classes": list(manifest.classes), "fields": ["cls", "jpg"], "digest": manifest.digest}
    pack = json.loads((packed / "shardio.json").read_bytes())["pack"]
    found = json_of(packed)
    assert found.pop("decoded") == {**decoders, "clipped": {}, "reasons": reasons}
    assert found == {**numbers, **names, "pack": pack}

    write_images(tmp_path / "in", classes=10, per_class=1)
    shardio.pack(tmp_path / "in", tmp_path / "out", max_shard_samples=5)
    rows = rows_of(tmp_path / "out")
    assert rows["classes"] == f"10: {', '.join(f'class-{i}' for i in range(8))}, …"
    assert rows["shards"] == "2, 5 samples each"
    assert len(json_of(tmp_path / "out")["classes"]) == 10


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mixed")
    write_mixed(root / "images")
    shardio.pack(root / "images", root / "shards", max_shard_samples=5)
    return root / "shards"


def test_info_shows_the_decoders_that_the_loader_will_use(
    mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_pillow = "3 by Pillow (2 × PNG, 1 × 4 components)"
    others = f"2 by libjpeg-turbo (2 × no end-of-image marker); {by_pillow}"
    assert rows_of(mixed)["decoders"] == f"7 {BY_KERNEL}; {others}"
    found = json_of(mixed)["decoded"]
    counts = {name: found[name] for name in ("kernel", "libjpeg", "raw", "pillow")}
    assert (found["samples"], found["unreadable"]) == (12, 0)
    assert counts == {"kernel": 7, "libjpeg": 2, "raw": 0, "pillow": 3}
    reasons = {"libjpeg": {"no end-of-image marker": 2}, "raw": {}, "pillow": {"PNG": 2, "4 components": 1}}
    assert found["reasons"] == reasons
    loader = shardio.DataLoader(shardio.ShardDataset(mixed, transform=Resize((20, 20))), batch_size=4, num_workers=0)
    list(loader)
    assert loader.stats().num_images_by_decoder == {**counts, "device": 0, "cache": 0}

    with monkeypatch.context() as patch:
        patch.setattr("shardio.kernel.load_functions", lambda: (None, "the kernel cannot be loaded"))
        by_libjpeg = "9 by libjpeg-turbo (7 × no kernel, 2 × no end-of-image marker)"
        why = "no kernel because the kernel cannot be loaded"
        assert rows_of(mixed)["decoders"].startswith(f"{by_libjpeg}; {by_pillow}; {why}")
    for num_samples in (1, 5, 11):
        monkeypatch.setattr(look, "MAX_SAMPLES", num_samples)
        few = f"of {num_samples} evenly spaced sample{'s' * (num_samples > 1)}, "
        assert rows_of(mixed)["decoders"].startswith(few)
        found = json_of(mixed)["decoded"]
        num_decoded = sum(found[name] for name in ("kernel", "libjpeg", "pillow", "unreadable"))
        assert found["samples"] == num_decoded == num_samples
    (tmp_path / "shardio.json").write_bytes((mixed / "shardio.json").read_bytes())
    assert rows_of(tmp_path)["decoders"].startswith("unknown: "), "the shards are missing"
    assert json_of(tmp_path)["decoded"] is None


def test_info_of_foreign_tars_and_of_files_that_are_not_images(tmp_path: Path) -> None:
    write_tar(tmp_path / "x.tar", [("a.jpg", b"1"), ("b.jpg", b""), ("c.png", b"\xff\xd8\xff"), ("d.cls", b"0")])
    for source in (tmp_path, tmp_path / "x.tar"):
        rows = rows_of(source)
        assert (rows["samples"], rows["packed"], rows["classes"]) == ("4", "unknown: there is no manifest", "0")
        assert rows["decoders"] == "3 unreadable"
    write_tar(tmp_path / "y.tar", [("a.cls", b"0")])
    assert rows_of(tmp_path / "y.tar")["decoders"] == "no images"


def test_a_source_that_is_not_a_dataset_is_an_error_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("nothing", "nothing.tar", "nothing.json", "empty"):
        assert str(tmp_path / name) in error_of("info", tmp_path / name)
    (tmp_path / "shardio.json").write_bytes(b"{")
    assert error_of("info", tmp_path).startswith(f"error: the manifest {tmp_path}/shardio.json cannot be read")


@pytest.fixture
def tar(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    members = [("a/1.jpg", b"\xff\x00\n"), ("a/1.cls", b"7"), ("a/2.txt", b"two"), ("b.seg.png", b"")]
    write_tar(tmp_path / "in" / "a.tar", members)
    return tmp_path / "in" / "a.tar"


def test_ls_prints_the_keys_in_the_order_of_the_tars(packed: Path, tmp_path: Path) -> None:
    members = [name for path in sorted(packed.glob("*.tar")) for name, _ in read_members(path)]
    keys = list(dict.fromkeys(name.partition(".")[0] for name in members))
    for options, expected in ((), keys), (("--limit", 7), keys[:7]), (("--limit", 0), []):
        assert run("ls", packed, *options).stdout.splitlines() == expected
    write_tar(tmp_path / "a.tar", [("a\x1b[2J\n.txt", b"")])
    assert run("ls", tmp_path).stdout == "a\\x1b[2J\\n\n"


def test_ls_prints_fields_with_sizes(tar: Path) -> None:
    assert run("ls", tar, "--fields").stdout == "a/1\tcls 1\tjpg 3\na/2\ttxt 3\nb\tseg.png 0\n"
    lines = [json.loads(line) for line in run("ls", tar, "--json").stdout.splitlines()]
    with tarfile.open(tar) as opened:
        offsets = {member.name: member.offset_data for member in opened}
    assert [line["key"] for line in lines] == ["a/1", "a/2", "b"]
    assert {line["shard"] for line in lines} == {"a.tar"}
    found = {f"{line['key']}.{field}": at["offset"] for line in lines for field, at in line["fields"].items()}
    assert found == offsets


def test_cat_writes_the_bytes_of_a_field(tar: Path) -> None:
    assert run("cat", tar, "a/1", "--field", "jpg").stdout_bytes == b"\xff\x00\n"
    assert (run("cat", tar, "a/2").stdout_bytes, run("cat", tar, "b").stdout_bytes) == (b"two", b"")
    for arguments, error in (
        (["a/1"], "sample a/1 has several fields\nhint: choose one with --field: cls, jpg"),
        (["a/1", "--field", "png"], "has no field 'png'\nhint: choose one with --field: cls, jpg"),
        (["x"], "no sample has the key 'x'"),
    ):
        assert error in run("cat", tar, *arguments, code=1).stderr


def test_extract_writes_what_tarfile_extracts_and_overwrites_files_only_on_request(tar: Path, tmp_path: Path) -> None:
    out, whole = tmp_path / "out", tmp_path / "whole"
    assert "wrote 4 files, 7 B" in run("extract", tar, "a/1", "a/2", "b", "b", whole).stdout
    found = {str(path.relative_to(whole)): path.read_bytes() for path in whole.rglob("*") if path.is_file()}
    assert found == dict(read_members(tar))
    write_files(out, {"b.seg.png": b"mine"})
    assert "b.seg.png exists: pass --overwrite" in run("extract", tar, "a/1", "b", out, code=1).stderr
    assert read_files(out) == {"b.seg.png": b"mine"}
    run("extract", tar, "b", out, "--overwrite")
    assert read_files(out) == {"b.seg.png": b""}


def test_keys_that_lead_outside_are_refused(tmp_path: Path) -> None:
    """WebDataset also reads tars with these keys, which are harmful only if files are named after them."""
    refused = {
        "is an absolute path": ["/etc/x", "\\\\server\\x"],
        "contains '..'": ["../x", "a/../../x", "a\\..\\x"],
        "starts with a drive": ["C:x", "c:/x"],
    }
    (tmp_path / "in").mkdir()
    out = tmp_path / "deep" / "out"
    for why, keys in refused.items():
        for key in keys:
            write_tar(tmp_path / "in" / "a.tar", [(f"{key}.txt", b"")])
            assert why in run("extract", tmp_path / "in", "--", key, out, code=1).stderr
            assert not out.parent.exists()


@pytest.mark.parametrize("at", ["a", "a/1.jpg"])
def test_symbolic_links_on_the_way_are_refused(tar: Path, tmp_path: Path, at: str) -> None:
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (out / at).parent.mkdir(parents=True)
    (out / at).symlink_to(elsewhere if at == "a" else elsewhere / "1.jpg")
    assert f"{out / at} is a symbolic link" in run("extract", tar, "a/1", out, "--overwrite", code=1).stderr
    assert not list(elsewhere.iterdir())


def test_samples_whose_files_are_in_the_way_of_each_other_are_refused(tar: Path, tmp_path: Path) -> None:
    out, other = tmp_path / "out", tmp_path / "a.tar"
    write_tar(other, [("x.txt", b""), ("x.txt/y.txt", b""), ("a//b.txt", b"1"), ("a/b.txt", b"2")])
    for source, keys, error in (
        (other, ["x.txt/y", "x"], "would be the file of sample 'x' and a directory"),
        (other, ["a//b", "a/b"], "would be written to the same file"),
        (tar, ["b", "x"], "no sample has the key 'x'"),
    ):
        assert error in run("extract", source, *keys, out, code=1).stderr
        assert not out.exists()
    write_files(out, {"x.txt": b""})
    error = "is a file, but sample 'x.txt/y' needs a directory there"
    assert error in run("extract", other, "x.txt/y", out, code=1).stderr


def rows(*arguments: object) -> dict[str, str]:
    """Return the values that ``shardio order`` prints, by name. The names are 11 columns wide."""
    return {line[:11].strip(): line[12:] for line in run("order", *arguments).stdout.splitlines()}


def test_order_prints_the_settings_and_the_measurements(packed: Path) -> None:
    found = rows(packed)
    assert found["epoch"] == "0, seed 0: 21 samples in 5 shards"
    assert (found["window"], found["read by"]) == ("21 samples in 1 stratum", "1 rank, batches of 256")
    assert found["moved by"].endswith("of the epoch on average (ideal 0.333)")
    assert found["neighbors"].endswith("of the epoch apart (ideal 0.333)")
    # One batch has all 21 samples, so the probability equals the ideal one.
    probability, ideal = (found["same shard"].split()[i] for i in (1, -1))
    assert f"{probability})" == ideal
    assert found["shards open"].endswith(", 4 at most")
    assert found["bytes read"].startswith("1.00 times")
    table = [line.split() for line in run("order", packed, "--batch-size", 2).stdout.splitlines()[-2:]]
    assert [row[0] for row in table] == ["1", "8"]
    # One rank fetches each shard with one request, so there are 5 requests for 21 samples.
    assert table[0][1:4] == [f"{1000 * 5 / 21:.1f}", "1.00", "×"]

    options = ("--window", 6, "--strata", 2, "--world-size", 2, "--batch-size", 4)
    found = rows(packed, *options, "--seed", 5, "--epoch", 7)
    assert found["epoch"] == "7, seed 5: 21 samples in 5 shards"
    assert (found["window"], found["read by"]) == ("6 samples in 2 strata", "2 ranks, batches of 4")
    assert found != rows(packed, *options)
    assert rows(packed, "--world-size", 50)["shards open"] == "1.0 per rank on average, 1 at most"
    lines = run("order", packed, "--window", 2, "--strata", 1, "--batch-size", 3, "--world-size", 5).stdout.splitlines()
    assert [line.split()[0] for line in lines[-2:]] == ["1", "5"]  # A step is longer than a window.
    for name, value in (("--strata", 0), ("--window", -1), ("--world-size", 0), ("--epoch", -1)):
        assert name in usage_error("order", packed, name, value)


def test_the_plot_is_a_png_with_a_panel_of_shards_if_there_are_several(
    packed: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, path, missing = tmp_path / "one", tmp_path / "order.png", tmp_path / "missing" / "order.png"
    shardio.pack(images, one)
    for folder, height in ((one, 480), (packed, 960)):
        rows(folder, "--plot", path)
        with Image.open(path) as picture:
            assert (picture.format, picture.height) == ("PNG", height)
            pixels = np.asarray(picture.convert("RGB"))
        # The plot has colored points, not only gray axes and text.
        assert np.ptp(pixels.astype(int), axis=2).max() > 50
    assert rows_of(one)["shards"] == "1, 21 samples"
    assert "max_shard_size 256 MiB" in rows_of(one)["packed"]
    run("view", one, "-o", tmp_path / "page.html")
    page = Page((tmp_path / "page.html").read_bytes())
    assert list(zip(page.texts["b"], page.texts["span"], strict=False))[:2] == [("21", "samples"), ("1", "shard")]

    assert "must end in .png" in usage_error("order", packed, "--plot", tmp_path / "order.jpg")
    done = run_main("order", packed, "--plot", missing)
    assert (done.code, done.stderr) == (1, f"error: {missing}: No such file or directory\n")
    assert not (tmp_path / "order.jpg").exists()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    error = "error: --plot needs matplotlib\nhint: pip install matplotlib\n"
    assert error_of("order", packed, "--plot", path) == error
    assert rows(packed)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, content = tmp_path_factory.mktemp("doctor") / "measured", np.random.default_rng(0)
    with ShardWriter(folder, max_shard_samples=10) as writer:
        for number in range(30):
            writer.write({"__key__": str(number), "bin": content.bytes(50_000)})
    return folder


@pytest.mark.slow
def test_latency_and_bandwidth_are_those_of_the_store(seaweedfs_server: Server, measured: Path) -> None:
    url = str(upload(measured, f"{seaweedfs_server.url}/{uuid.uuid4().hex}", seaweedfs_server.options))
    script = Script(latency_s=0.05, connection_bytes_per_s=2e6)
    with FaultProxy(seaweedfs_server.host, seaweedfs_server.port, script) as proxy:
        options = seaweedfs_server.behind(proxy.host, proxy.port).options
        arguments = [f"--storage-option={name}={value}" for name, value in options.items()]
        found = json.loads(run("doctor", url, "--seconds", 0.3, "--json", *arguments).stdout)["store"]
    assert found["latency_s"] >= 0.05
    assert found["bytes_per_s"]["1"] <= 2.2e6, "the proxy limits a single connection"
    assert found["bytes_per_s"]["16"] > 4 * found["bytes_per_s"]["1"], "several connections exceed the limit"
    assert found["saturated_by"] > 2
    assert found["samples_per_s"] == pytest.approx(max(found["bytes_per_s"].values()) / found["bytes_per_sample"])


@pytest.mark.parametrize(("rate", "verdict"), [(1, "fast enough"), (1e9, "too slow: cache the data")])
def test_it_says_whether_the_store_is_fast_enough(measured: Path, rate: float, verdict: str) -> None:
    output = run("doctor", measured, "--seconds", 0.05, "--rate", rate).stdout
    assert verdict in output
    assert "ms for one byte" in output


SCRIPT = """
import torch
from torch.utils.data import DataLoader, TensorDataset


def make_loader():
    return DataLoader(TensorDataset(torch.zeros(64, 3)), batch_size=8)


def step(batch):
    return batch[0].sum()
"""


def test_the_doctor_examines_loaders_of_scripts_and_datasets(packed: Path, images: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    short, make, step = ("--seconds", 0.05), f"{tmp_path / 'train.py'}:make_loader", f"{tmp_path / 'train.py'}:step"
    output = run("doctor", make, "--step", step, *short).stdout
    assert re.match(r"Loading (holds training back|is not the bottleneck): training spends \d+% of its time ", output)
    found = json.loads(run("doctor", make, *short, "--json").stdout)
    assert found["store"] is None
    assert (found["loader"]["step_samples_per_s"], found["loader"]["loader"]["batch_size"]) == (None, 8)
    for source in (packed, images):
        output = run("doctor", source, "--num-workers", 0, "--batch-size", 4, "--rate", 5, *short).stdout
        assert "\nneeded: 5 samples/s; the loader delivers " in output
        assert "decoding, cropping, resizing" in output
    assert "--rate applies only to datasets: pass --step instead" in usage_error("doctor", make, "--rate", 5)
    assert "has no function 'none'" in usage_error("doctor", f"{tmp_path / 'train.py'}:none")
    assert "no such directory" in error_of("doctor", tmp_path / "nothing")
