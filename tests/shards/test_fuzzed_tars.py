"""Random hostile tars and indexes; ``tools/fuzz_tars.py`` reads millions of them."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from shardio.shards.tar import END
from tests.shards.hostile_shards import HostileShard, make_shard
from tests.shards.tar_blocks import make_header, pad
from tests.shards.tar_laws import LawBrokenError, Laws


@given(st.integers(0, 2**31))
@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
def test_hostile_files_are_refused_or_read_as_tarfile_reads_them(seed: int) -> None:
    rng = random.Random(seed)
    Laws().check(make_shard(rng), rng)


@given(st.binary(max_size=2000), st.sampled_from("TIZJ"))
@settings(max_examples=100)
def test_any_bytes_are_files_to_check(content: bytes, kind: str) -> None:
    Laws().check(HostileShard.load(kind.encode() + content), random.Random(0))


@pytest.mark.parametrize("seed", range(12))
def test_hostile_files_on_a_disk_are_refused_or_read(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Laws().check_folder(make_shard(random.Random(seed)), tmp_path)


def test_a_shard_is_that_of_its_seed_and_is_loaded_as_it_was_dumped() -> None:
    shards = [make_shard(random.Random(seed)) for seed in range(300)]
    assert shards == [make_shard(random.Random(seed)) for seed in range(300)]
    assert [HostileShard.load(shard.dump()) for shard in shards] == shards
    kinds = Counter((shard.is_compressed, shard.index is not None) for shard in shards)
    assert len(kinds) == 4


def test_hostile_files_are_neither_all_refused_nor_all_read() -> None:
    laws = Laws()
    for seed in range(200):
        laws.check(make_shard(random.Random(seed)), random.Random(seed))
    for what in ("index", "read", "read columns"):
        assert laws.outcomes[f"{what}: done"] > 20
        assert laws.outcomes[f"{what}: FormatError"] > 20


def test_a_wrong_result_breaks_a_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above prove something only if the laws can be broken."""
    tar = bytes(make_header(random.Random(0), b"a.txt", 3)) + pad(b"abc") + END
    Laws().check(HostileShard(tar=tar), random.Random(0))
    for wrong in (lambda content: None, lambda content: [], lambda content: [("a.txt", 512, 2)]):
        monkeypatch.setattr("tests.shards.tar_laws.read_by_tarfile", wrong)
        with pytest.raises(LawBrokenError, match="tarfile re"):
            Laws().check(HostileShard(tar=tar), random.Random(0))


def test_an_error_that_is_not_shardios_own_breaks_a_law(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.shards.tar_laws.write_index_of", {}.__getitem__)
    with pytest.raises(LawBrokenError, match="index: KeyError"):
        Laws().check(HostileShard(tar=b""), random.Random(0))
