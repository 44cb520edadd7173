"""StreamDataset reads tars once per epoch, as ShardDataset and webdataset do, in a computed order, and can resume."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import shlex
import sys
import uuid
from collections.abc import Iterator
from itertools import islice, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import shardio
from shardio import DataLoader, FormatError, SampleError, ShardDataset, StateError, StreamDataset
from shardio.errors import LocationError
from shardio.order import StreamOrder
from shardio.storage import parse_location
from shardio.streams import find_streams
from shardio.transforms import RandomResizedCrop
from tests.raising import assert_raises
from tests.servers.server import put_all
from tests.sources import encode
from tests.tars import by_key, write_tar

FIELDS = ("key", "label", "image")

# torchdata triggers torch's warning.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


def pipe(path: Path) -> str:
    return f"pipe:cat {shlex.quote(str(path))}"


@pytest.fixture
def tars(packed: Path) -> list[Path]:
    return sorted(packed.glob("*.tar"))


def streams(tars: list[Path], **options: Any) -> StreamDataset:
    return StreamDataset([pipe(path) for path in tars], **{"fields": FIELDS, **options})


def keys_of(dataset: StreamDataset) -> list[str]:
    return [sample[0] for sample in dataset]


def test_samples_are_those_of_shard_dataset(packed: Path, tars: list[Path], tmp_path: Path) -> None:
    expected = list(ShardDataset(packed, fields=FIELDS))
    (tmp_path / "0.tar.gz").write_bytes(gzip.compress(tars[0].read_bytes()))
    root = put_all(packed, parse_location(f"memory://{uuid.uuid4().hex}/train"))
    sources: tuple[Any, ...] = (
        f"pipe:cat {packed}/shard-{{000000..000004}}.tar",
        f"{packed}/shard-{{000000..000004}}.tar",
        f"{root}/shard-{{000000..000004}}.tar",
        [pipe(tmp_path / "0.tar.gz"), *tars[1:3], *(path.as_uri() for path in tars[3:])],
    )
    for source in sources:
        found = list(pickle.loads(pickle.dumps(StreamDataset(source, fields=FIELDS))))
        assert [sample[:2] for sample in found] == [sample[:2] for sample in expected]
        assert all(torch.equal(one[2], other[2]) for one, other in zip(found, expected, strict=True))
    options: dict[str, Any] = {"decode": "pil", "decoders": {"cls": int}, "missing": None}
    options["transform_sample"] = lambda sample: (sample["image"].size, sample["cls"], sample.get("nothing"))
    decoded = StreamDataset(tars, fields=("image", "cls", "nothing"), **options)
    assert list(decoded) == list(ShardDataset(packed, fields=("image", "cls"), **options))


def test_contents_are_those_of_webdatasets_pipeline(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    for number in range(3):
        members = [(f"{number}/{i}.{field}", bytes([i]) * i) for i in range(9) for field in ("bin", "seg.png", "TXT")]
        write_tar(tmp_path / f"{number}.tar", [*members, (f"{number}/last.bin", b"alone")])
    source = f"pipe:cat {tmp_path}/{{0..2}}.tar"
    fields = ("bin", "seg.png", "txt")
    options: dict[str, Any] = {"decoders": dict.fromkeys(fields[1:], bytes), "missing": None, "shuffle": True}
    dataset = StreamDataset(source, fields=("key", *fields), **options)
    pipeline = webdataset.WebDataset(source, shardshuffle=False)
    expected = {sample["__key__"]: tuple(map(sample.get, fields)) for sample in pipeline}
    assert ({key: tuple(rest) for key, *rest in dataset}, len(expected)) == (expected, 30)


def order_of(
    num_shards: int, shuffle: bool, rank: int, world_size: int, worker_id: int, num_workers: int
) -> StreamOrder:
    share = {"rank": rank, "world_size": world_size, "worker_id": worker_id, "num_workers": num_workers}
    return StreamOrder(num_shards=num_shards, seed=0, shuffle=shuffle, **share)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("num_shards", "world_size", "num_workers"), [(5, 1, 1), (17, 3, 2), (64, 4, 4), (5, 4, 3)])
def test_each_tar_is_read_by_one_worker(shuffle: bool, num_shards: int, world_size: int, num_workers: int) -> None:
    places = list(product(range(world_size), range(num_workers)))
    orders = [order_of(num_shards, shuffle, rank, world_size, worker, num_workers) for rank, worker in places]
    for epoch in range(3):
        shares = [order.own_shards(epoch).tolist() for order in orders]
        assert sorted(shard for share in shares for shard in share) == list(range(num_shards))
        sizes = list(map(len, shares))
        of_ranks = [sum(sizes[rank * num_workers : (rank + 1) * num_workers]) for rank in range(world_size)]
        assert max(max(each) - min(each) for each in (of_ranks, sizes)) <= 1


@pytest.mark.parametrize(("loader", "num_workers"), [(DataLoader, 0), (DataLoader, 2), (TorchLoader, 2)])
def test_ranks_and_workers_deliver_each_sample_once(tars: list[Path], loader: Any, num_workers: int) -> None:
    options: dict[str, Any] = {"fields": "key", "shuffle": True, "buffer": 3, "world_size": 2, "seed": 5}
    datasets = [streams(tars, rank=rank, **options) for rank in range(2)]
    options = {"batch_size": 2, "num_workers": num_workers, "persistent_workers": num_workers > 0}
    loaders = [loader(each, **options) for each in datasets]
    orders = list[list[str]]()
    for epoch in range(2):
        for each in datasets:
            each.set_epoch(epoch)
        orders.append([key for each in loaders for batch in each for key in batch])
        assert sorted(orders[-1]) == sorted(by_key(*tars))
    assert orders[0] != orders[1]


def test_the_order_is_a_function_of_seed_and_epoch_and_shuffles_windows(tars: list[Path]) -> None:
    def order(seed: int, epoch: int, **options: Any) -> list[str]:
        dataset = streams(tars, shuffle=True, seed=seed, **{"buffer": 8, **options})
        dataset.set_epoch(epoch)
        found = keys_of(dataset)
        assert keys_of(dataset) == found, "without set_epoch, an epoch is repeated"
        return found

    assert order(1, 4) == order(1, 4, transform=RandomResizedCrop(8))  # Transforms change only the chunks.
    different = [order(1, 4), order(1, 5), order(2, 4), order(1, 4, buffer=3), keys_of(streams(tars))]
    assert (len(set(map(tuple, different))), len({frozenset(each) for each in different})) == (5, 1)
    shards = order_of(len(tars), True, 0, 1, 0, 1).own_shards(0)
    read = [key for shard in shards.tolist() for key in by_key(tars[shard])]
    found = order(0, 0, buffer=6)
    assert found != read
    assert all({*found[start : start + 6]} == {*read[start : start + 6]} for start in range(0, len(read), 6))


def test_random_transforms_do_not_depend_on_workers_or_ranks(tars: list[Path]) -> None:
    def images(**options: Any) -> dict[str, torch.Tensor]:
        dataset = streams(tars, transform=RandomResizedCrop(16), seed=3, **options)
        dataset.set_epoch(2)
        loader = DataLoader(dataset, batch_size=None, num_workers=2, worker_method="thread")
        return {key: image for key, _, image in (loader if "buffer" in options else dataset)}

    ranks = [images(shuffle=True, buffer=9, rank=rank, world_size=2) for rank in range(2)]
    found = [images(), images(shuffle=True, buffer=5), ranks[0] | ranks[1]]
    assert all(each.keys() == found[0].keys() for each in found)
    assert all(torch.equal(image, each[key]) for each in found for key, image in found[0].items())


def test_bad_samples_raise_and_the_others_are_delivered(tmp_path: Path) -> None:
    good = encode(1)
    members = [("a.jpg", good), ("b.jpg", good[:40]), ("c.jpg", good), ("d.txt", b""), ("e.jpg", good)]
    write_tar(tmp_path / "a.tar", members)
    samples = iter(StreamDataset([pipe(tmp_path / "a.tar")], fields=("key", "image")))
    for key in "abcde":
        if key in "bd":
            error = assert_raises(SampleError, rf"sample {key} in stream 0 \(pipe:cat … a.tar\)", next, samples)
            assert error.key == key
        else:
            assert next(samples)[0] == key
    assert next(samples, None) is None


def test_the_shell_gets_a_command_as_it_was_written() -> None:
    for source, expected in (
        ("tr '\\n' ' ' < a\\ b${X:-1,2}/{0..1}.tar; echo \\{a,b\\}", "tr '\\n' ' ' < a\\ b${X:-1,2}/N.tar; echo {a,b}"),
        ("cat x-{0..1}.tar | awk '\\{print $1, $2\\}' OFS=' '", "cat x-N.tar | awk '{print $1, $2}' OFS=' '"),
    ):
        found = [each.name for each in find_streams(f"pipe:{source}")]
        assert found == [f"pipe:{expected.replace('N', number)}" for number in "01"]
    assert find_streams(r"pipe:printf '\n'")[0].name == r"pipe:printf '\n'"


CURL = "curl -H 'Authorization: secret2' 'https://u:secret3@h/t/{0..1}.tar?sig=secret4'"
SHOWN = {
    f"pipe:TOKEN=secret1 {CURL}": "stream 0 (pipe:curl … 0.tar)",
    "pipe:./download secret1": "stream 0 (pipe:./download …)",
    'pipe:TOKEN="secret1 secret2" curl https://h/{0..1}.tar': "stream 0 (pipe:curl … 0.tar)",
    "https://u:secret3@example.org/t/{0..1}.tar?sig=secret4#x": "https://example.org/t/0.tar",
    "https://u:secret3@secret4@example.org/t/0.tar": "https://example.org/t/0.tar",
}


@pytest.mark.parametrize(("name", "shown"), SHOWN.items())
def test_secrets_are_not_shown(name: str, shown: str) -> None:
    dataset = StreamDataset(name)
    assert str(dataset.sources[0]) == shown
    assert "secret" not in f"{dataset.sources}{dataset}{iter(dataset).state_dict()}"


def test_what_cannot_be_read_is_refused_at_once(tmp_path: Path, tars: list[Path]) -> None:
    refused: list[tuple[Any, type[Exception], str]] = [
        ([], ValueError, "at least one"),
        ([tars[0], tars[1], tars[0]], FormatError, "named twice"),
        (tmp_path / "none-{0..1}.tar", FileNotFoundError, "no such tar: .*none-0.tar, .*none-1.tar"),
        (tmp_path, FileNotFoundError, "is a directory: name its tars"),
        ("pipe:cat {0..3.tar", ValueError, "braces"),
        ("nothing://x/a.tar", LocationError, "nothing:// is not supported"),
    ]
    for source, kind, message in refused:
        assert_raises(kind, message, StreamDataset, source)
    for options in ({"buffer": 0}, {"retries": -1}, {"timeout_s": 0}, {"seed": -1}, {"shuffle": "no"}):
        assert_raises((TypeError, ValueError), next(iter(options)), StreamDataset, tars, **options)
    message = r"2 tars cannot be split over 3 ranks.*shardio index"
    assert_raises(ValueError, message, iter, streams(tars[:2], rank=0, world_size=3))


def test_without_webdataset_only_stored_tars_are_read(tars: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "webdataset.gopen", None)
    assert keys_of(StreamDataset(tars, fields=("key",))) == list(by_key(*tars))
    assert_raises(ImportError, r"pip install 'shardio-loader\[webdataset\]'", StreamDataset, "pipe:cat x")
    assert str(StreamDataset("s3://bucket/{0..1}.tar").sources[1]) == "s3://bucket/1.tar"


def test_schemes_that_users_register_are_opened(tars: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    gopen = pytest.importorskip("webdataset.gopen")
    opened = list[str]()

    def open_mine(url: str, *_: object) -> io.BytesIO:
        opened.append(url)
        return io.BytesIO(tars[0].read_bytes())

    monkeypatch.setitem(gopen.gopen_schemes, "mine", open_mine)
    assert keys_of(StreamDataset("mine://x/a.tar", fields=("key",))) == list(by_key(tars[0]))
    assert opened == ["mine://x/a.tar"]


def test_other_readers_name_stream_dataset() -> None:
    for call in (ShardDataset, shardio.ShardMapDataset, shardio.open):
        assert "secret" not in str(assert_raises(LocationError, r"shardio\.StreamDataset", call, "pipe:cat secret"))
    assert_raises(shardio.PackError, r"the source is a command \(pipe:\)", shardio.pack, "pipe:cat x", "out")


def test_a_wrapper_that_splits_over_ranks_again_is_refused(tars: list[Path]) -> None:
    class IterableDatasetShard:
        """A class with the same name as Accelerate's and Transformers' wrappers."""

        num_processes = 2

        def __init__(self, dataset: StreamDataset) -> None:
            self.dataset = dataset

        def __iter__(self) -> Iterator[Any]:
            yield from self.dataset

    message = r"StreamDataset has already split them.*lost\. Let only the framework split: create StreamDataset\("
    assert_raises(RuntimeError, message, list, IterableDatasetShard(streams(tars, rank=0, world_size=2)))


def make_dataset(packed: Path, log: Path | None = None, **options: Any) -> StreamDataset:
    """Return a dataset of stored tars, or, if ``log`` is given, of commands that record in it which tars they read."""
    note = f"echo {{}} >> {shlex.quote(str(log))}; "
    tars = sorted(packed.glob("*.tar"))
    sources = tars if log is None else [f"pipe:{note.format(path.name)}cat {path}" for path in tars]
    defaults: dict[str, Any] = {"fields": ("key", "image"), "shuffle": True, "buffer": 4, "seed": 1}
    return StreamDataset(sources, **{**defaults, "transform": RandomResizedCrop(8), **options})


def describe(batches: Any) -> list[Any]:
    return [(list(keys), images.tolist()) for keys, images in batches]


def save(state: Any) -> Any:
    return json.loads(json.dumps(state))


@pytest.mark.parametrize("shuffle", [False, True])
def test_an_iterator_resumes_after_any_sample(packed: Path, shuffle: bool) -> None:
    dataset = make_dataset(packed, shuffle=shuffle, fields="key", transform=None)
    dataset.set_epoch(3)
    whole = list(dataset)
    running = iter(dataset)
    for number in range(len(whole) + 1):
        resumed = iter(dataset)
        resumed.load_state_dict(save(running.state_dict()))
        assert list(resumed) == whole[number:]
        assert next(running, None) == (whole[number] if number < len(whole) else None)


@pytest.mark.parametrize(
    ("loader", "num_workers", "shuffle"),
    [
        (DataLoader, 0, True),
        (DataLoader, 2, True),
        (StatefulDataLoader, 0, False),
        pytest.param(StatefulDataLoader, 2, True, marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_is_the_rest_of_a_whole_one(packed: Path, loader: Any, num_workers: int, shuffle: bool) -> None:
    def make() -> Any:
        dataset = make_dataset(packed, shuffle=shuffle, rank=0, world_size=1)
        return loader(dataset, batch_size=2, num_workers=num_workers)

    def run(loader: Any, epoch: int) -> list[Any]:
        loader.dataset.set_epoch(epoch)
        return describe(loader)

    whole = make()
    epochs = [run(whole, epoch) for epoch in range(2)]
    for stop in (3, len(epochs[0])):
        first, resumed = make(), make()
        first.dataset.set_epoch(0)
        before = describe(islice(first, stop))
        resumed.load_state_dict(save(first.state_dict()))
        assert (before + run(resumed, 0), run(resumed, 1)) == (epochs[0], epochs[1])


def test_a_resumed_worker_opens_no_tar_that_was_consumed(packed: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    running = iter(make_dataset(packed, log, shuffle=False))
    assert (
        len(list(islice(running, 11))) == 11
    )  # The first two tars have five samples each; the last sample is from the third tar.
    running.close()
    names = log.read_text().split()
    log.unlink()
    resumed = iter(make_dataset(packed, log, shuffle=False))
    resumed.load_state_dict(running.state_dict())
    assert len(list(resumed)) == 10
    assert log.read_text().split() == sorted(names)[2:] + [f"shard-{i:06d}.tar" for i in range(len(names), 5)]


OTHERS = [("abXdefghij", None), ("abc", None), ("abcdeXghij", 8), ("abcdefg", 8), ("XYZUVWabcd", 8)]


@pytest.mark.parametrize(("names", "buffer"), OTHERS)
def test_a_state_of_other_samples_is_refused(tmp_path: Path, names: str, buffer: int | None) -> None:
    def begin(names: str) -> Any:
        write_tar(tmp_path / "a.tar", [(f"{name}.txt", b"x") for name in names])
        options: dict[str, Any] = {"shuffle": True, "buffer": buffer} if buffer else {}
        return iter(StreamDataset(tmp_path / "a.tar", fields="key", **options))

    running = begin("abcdefghij")
    assert len(list(islice(running, 5))) == 5
    state = save(running.state_dict())
    if not buffer:  # A state stays valid if only samples after its position have changed.
        resumed = begin("abcdeXYZ")
        resumed.load_state_dict(state)
        assert list(resumed) == ["X", "Y", "Z"]
    resumed = begin(names)
    resumed.load_state_dict(state)
    message = ", or a stream after it, does not have the same" if buffer else " does not begin with the same 5 samples"
    assert_raises(StateError, rf"a\.tar{message}", next, resumed)
    assert_raises(RuntimeError, "ended before its last batch", next, resumed)  # The error is not StopIteration.


def test_what_is_no_state_of_this_order_is_refused(packed: Path) -> None:
    iterator = iter(make_dataset(packed))
    state = iterator.state_dict()
    place = state["place"]
    parts: list[dict[str, Any]] = [{"version": 99}, {"dataset": {}}, {"epoch": -1}, {"place": {}}]
    parts += [{"place": {**place, "turn": "1"}}, {"place": {**place, "digest": "xyz"}}]
    for damaged in (None, {}, *({**state, **part} for part in parts)):
        assert_raises(StateError, None, iterator.load_state_dict, damaged)
    others: list[tuple[dict[str, Any], str]] = [
        ({"seed": 2}, r"order.seed is 1 in the state and 2 here"),
        ({"shuffle": False}, r"order.shuffle is True"),
        ({"buffer": 5}, r"order.buffer is 4"),
        ({"rank": 1, "world_size": 2}, r"share.rank is 0 in the state and 1 here; share.world_size"),
    ]
    for options, message in others:
        assert_raises(StateError, message, iter(make_dataset(packed, **options)).load_state_dict, state)
    iterator.load_state_dict(state)
    assert len(list(iterator)) == 21


def test_changed_tokens_do_not_change_the_state(packed: Path) -> None:
    tar = packed / "shard-000000.tar"
    running = iter(StreamDataset(f"pipe:TOKEN=old cat {tar}", fields="key"))
    expected = list(StreamDataset(tar, fields="key"))
    assert next(running) == expected[0]
    resumed = iter(StreamDataset(f"pipe:TOKEN=new cat {tar}", fields="key"))
    resumed.load_state_dict(running.state_dict())
    assert list(resumed) == expected[1:]
    assert torch.is_tensor(next(iter(StreamDataset(tar)))[0])
