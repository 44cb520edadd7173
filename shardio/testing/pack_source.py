"""Conformance tests for a kind of dataset that can be packed. The tests need the ``pytest`` package."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from shardio.errors import PackError
from shardio.packing import PackOptions, PackSource
from shardio.packing.packer import pack_source
from shardio.packing.samples import check_name
from shardio.packing.sources.records import close_records
from shardio.packing.sources.source import OPTIONS_OF_KINDS, SOURCES, FileChangedError, SourceTable
from shardio.sample import Sample
from shardio.shards import LABEL_FIELD, join_name


def read_all(table: SourceTable) -> list[Sample]:
    """Return all samples of a source."""
    return [sample.read() for sample in table.take(np.arange(len(table)))]


def write_others(folder: Path) -> None:
    """Write a small dataset of each general kind: tables of paths, a directory of images, and tars."""
    for name in ("images/class", "tars"):
        (folder / name).mkdir(parents=True)
    image = folder / "images" / "class" / "a.jpg"
    PIL.Image.new("RGB", (8, 8)).save(image)
    (folder / "a.csv").write_text("path,label\nimages/class/a.jpg,0\n")
    (folder / "a.jsonl").write_text(json.dumps({"path": "images/class/a.jpg", "label": 0}) + "\n")
    with tarfile.open(folder / "tars" / "a.tar", "w") as tar:
        tar.add(image, "a.jpg")


class PackSourceTests:
    """Tests of the laws that :class:`shardio.packing.PackSource` states.

    Subclass it, and override :meth:`source` and :meth:`dataset`, and the other fixtures where their defaults do not
    fit::

        class TestZips(PackSourceTests):
            @pytest.fixture
            def source(self) -> PackSource:
                return Zips()

            @pytest.fixture
            def dataset(self, tmp_path: Path) -> Path:
                (tmp_path / "in").mkdir()
                return write_zips(tmp_path / "in" / "train.zip", num_samples=5)
    """

    @pytest.fixture
    def source(self) -> PackSource:
        """Return the kind of source."""
        raise NotImplementedError("override the fixture `source`")

    @pytest.fixture
    def dataset(self, tmp_path: Path) -> Path:
        """Write a dataset of at least three samples below a folder of ``tmp_path``, and return the path to pack."""
        raise NotImplementedError("override the fixture `dataset`")

    @pytest.fixture
    def options(self) -> PackOptions:
        """Return the options with which the dataset is packed."""
        return PackOptions(check=False)

    @pytest.fixture
    def files(self, dataset: Path) -> Sequence[Path]:
        """Return the files in which a pack must detect changes; by default, all files of the dataset."""
        return [path for path in sorted(dataset.rglob("*")) if path.is_file()] if dataset.is_dir() else [dataset]

    @pytest.fixture
    def change_label(self) -> Callable[[Path], object] | None:
        """Return a function that changes a label outside ``files``, or None if there are no such labels."""
        return None

    @pytest.fixture(autouse=True)
    def _closed(self) -> Iterator[None]:
        yield
        close_records()

    def test_its_own_datasets_alone_are_found(self, source: PackSource, dataset: Path, tmp_path: Path) -> None:
        found = source.find(dataset)
        assert found is not None
        assert found.file.exists()
        (tmp_path / "empty").mkdir()
        (tmp_path / "text").write_bytes(b"text")
        for other in ("empty", "text", "missing"):
            assert source.find(tmp_path / other) is None

    def test_datasets_of_more_general_kinds_keep_theirs(self, source: PackSource, tmp_path: Path) -> None:
        write_others(tmp_path / "others")
        classes = [entry.partition(":")[2] for entry in SOURCES.values()]
        own = classes.index(name) if (name := type(source).__name__) in classes else -1
        for other, kind in {"a.jsonl": "table", "a.csv": "table", "images": "files", "tars": "tars"}.items():
            is_later = own >= list[str](SOURCES).index(kind)  # The search finds earlier kinds first.
            assert is_later or source.find(tmp_path / "others" / other) is None

    def test_damaged_files_never_fail_the_search(self, source: PackSource, dataset: Path, tmp_path: Path) -> None:
        home = dataset if dataset.is_dir() else dataset.parent
        for percent in (0, 10, 50, 90):
            copy = Path(shutil.copytree(home, tmp_path / f"damaged-{percent}"))
            for path in filter(Path.is_file, copy.rglob("*")):
                os.truncate(path, path.stat().st_size * percent // 100)
            source.find(copy / dataset.relative_to(home))

    def test_it_describes_itself(self, source: PackSource) -> None:
        assert source.what
        assert set(source.takes) <= set(OPTIONS_OF_KINDS)

    def test_two_scans_find_the_same(self, source: PackSource, dataset: Path, options: PackOptions) -> None:
        one, two = (source.scan(dataset, options) for _ in range(2))
        assert (one.classes, list(one.ignored)) == (two.classes, list(two.ignored))
        assert (list(one.samples.keys), one.samples.digest()) == (list(two.samples.keys), two.samples.digest())
        np.testing.assert_array_equal(one.samples.sizes_in_tar(), two.samples.sizes_in_tar())

    def test_the_digest_depends_on_files_and_labels(
        self,
        source: PackSource,
        dataset: Path,
        options: PackOptions,
        files: Sequence[Path],
        change_label: Callable[[Path], object] | None,
    ) -> None:
        digests = [source.scan(dataset, options).samples.digest()]
        for file in files:
            os.utime(file, ns=(0, file.stat().st_mtime_ns + 10**9))
            digests.append(source.scan(dataset, options).samples.digest())
        if change_label is not None:
            change_label(dataset)
            digests.append(source.scan(dataset, options).samples.digest())
        assert len(set(digests)) == len(digests), "an unfinished pack would be resumed with different samples"

    def test_samples_are_valid(self, source: PackSource, dataset: Path, options: PackOptions) -> None:
        scan = source.scan(dataset, options)
        samples, keys = read_all(scan.samples), list(scan.samples.keys)
        assert len(keys) == len(scan.samples) == len(set(keys)) >= 3
        assert [sample.key for sample in samples] == keys
        for sample in samples:
            assert list(sample.fields) == sorted(sample.fields)
            for name, content in sample.fields.items():
                assert check_name(sample.key, name) == (sample.key, name)
                assert isinstance(content, bytes)
            if scan.classes and LABEL_FIELD in sample.fields:
                assert int(sample.fields[LABEL_FIELD]) < len(scan.classes)

    def test_sizes_are_positive(self, source: PackSource, dataset: Path, options: PackOptions) -> None:
        samples = source.scan(dataset, options).samples
        sizes = samples.sizes_in_tar()
        assert (sizes.dtype, sizes.shape) == (np.dtype(np.int64), (len(samples),))
        assert sizes.min() > 0
        assert samples.num_bytes > 0

    def test_samples_are_read_in_any_order_and_from_copies(
        self, source: PackSource, dataset: Path, options: PackOptions
    ) -> None:
        table = source.scan(dataset, options).samples
        expected = read_all(table)
        order = np.random.default_rng(0).permutation(len(table))
        copies = pickle.loads(pickle.dumps(table.take(order)))
        close_records()
        assert [copy.read() for copy in copies] == [expected[row] for row in order.tolist()]

    def test_a_problem_names_its_place(self, source: PackSource, dataset: Path, options: PackOptions) -> None:
        scan = source.scan(dataset, options)
        for sample in scan.samples.take(np.arange(len(scan.samples))):
            field = next(name for name in sample.read().fields if name != LABEL_FIELD)
            path, what = sample.problem(field, "is damaged")
            assert Path(str(path)).exists()
            assert what.endswith("is damaged")
            assert str(path).startswith(scan.samples.root)

    def test_changes_of_files_are_noticed(
        self, source: PackSource, dataset: Path, options: PackOptions, files: Sequence[Path], tmp_path: Path
    ) -> None:
        home = dataset if dataset.is_dir() else dataset.parent
        for number, file in enumerate(files):
            copy = Path(shutil.copytree(home, tmp_path / f"copy-{number}"))
            samples = source.scan(copy / dataset.relative_to(home), options).samples
            assert list(samples.find_changes()) == []
            changed = copy / file.relative_to(home)
            with changed.open("ab") as opened:
                opened.write(b"\0")
            assert [str(problem.path) for problem in samples.find_changes()] == [str(changed)]
            with pytest.raises((FileChangedError, PackError), match=rf"{re.escape(changed.name)} changed"):
                read_all(samples)

    def test_packing_stores_the_samples(
        self, source: PackSource, dataset: Path, options: PackOptions, tmp_path: Path
    ) -> None:
        expected = dict[str, bytes]()
        for sample in read_all(source.scan(dataset, options).samples):
            expected |= {join_name(sample.key, name): content for name, content in sample.fields.items()}
        close_records()
        pack_source(dataset, tmp_path / "out", replace(options, num_workers=1, max_shard_samples=2))
        found = dict[str, bytes]()
        for path in (tmp_path / "out").glob("*.tar"):
            with tarfile.open(path) as tar:
                found |= {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
        assert found == expected
