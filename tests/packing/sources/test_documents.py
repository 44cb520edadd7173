"""Documents, which are texts or tokens in files of several formats, become arrays of tokens for PackedTokens."""

from __future__ import annotations

import io
import json
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import shardio
from shardio.errors import PackError
from shardio.packing import PackOptions, append
from shardio.packing.sources.documents import Documents
from shardio.testing.pack_source import PackSourceTests
from tests.cli.commands import run
from tests.files import read_files
from tests.packing.packs import Interrupt, assert_refused, exit_code_if_killed, pack, read_packed
from tests.raising import assert_raises
from tests.sources import write_images

pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
datasets = pytest.importorskip("datasets")

TEXTS = ["zero", "", "päre\r\n", "x" * 3000, *(f"document {number} " * (number % 7) for number in range(4, 20))]
EOS = 3


def encode(text: str) -> list[int]:
    return list(text.encode())


TOKENS = [encode(text) for text in TEXTS]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))  # For worker processes.


def write_npy(folder: Path) -> None:
    for number, tokens in enumerate(TOKENS):
        np.save(folder / f"{number:02d}.npy", np.array(tokens, ("int64", "uint8")[number % 2]))


def write_safetensors(folder: Path) -> None:
    for part in range(2):
        rows = range(part * 10, part * 10 + 10)
        tensors = {f"{row:02d}": np.array(TOKENS[row], ("int32", "uint16")[row % 2]) for row in rows}
        save_file(tensors, folder / f"{part}.safetensors", metadata={"made by": "a test"})


def write_txt(folder: Path) -> None:
    for number, text in enumerate(TEXTS):
        (folder / f"{number:02d}.txt").write_bytes(text.encode())


def write_rows(folder: Path, columns: Mapping[str, Sequence[Any]], suffix: str) -> None:
    for part in range(2):
        own = {name: values[part * 10 : part * 10 + 10] for name, values in columns.items()}
        if suffix == "parquet":
            pq.write_table(pa.table(own), folder / f"{part}.parquet", row_group_size=3)
        else:
            rows = [dict(zip(own, values, strict=True)) for values in zip(*own.values(), strict=True)]
            (folder / f"{part}.{suffix}").write_text("\n".join(map(json.dumps, rows)) + "\n" * part)


IDS = [f"id/{number:02d}" for number in range(len(TEXTS))]
MASKS = [[1] * len(tokens) for tokens in TOKENS]
BOTH: dict[str, Sequence[Any]] = {"id": IDS, "text": TEXTS, "input_ids": TOKENS, "attention_mask": MASKS}
ENCODE: dict[str, Any] = {"tokenizer": encode}
ROWS: dict[str, Any] = {"source_kind": "documents"}

FORMATS: dict[str, tuple[Callable[[Path], None], dict[str, Any]]] = {
    "npy": (write_npy, {}),
    "safetensors": (write_safetensors, {}),
    "txt": (write_txt, ENCODE),
    "jsonl of text": (lambda folder: write_rows(folder, BOTH, "jsonl"), ENCODE),
    "json of tokens": (lambda folder: write_rows(folder, BOTH, "json"), ROWS),
    "parquet of text": (lambda folder: write_rows(folder, BOTH, "parquet"), ENCODE),
    "parquet of tokens": (lambda folder: write_rows(folder, BOTH, "parquet"), ROWS),
}


def write(form: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Write the documents in the given format. Return the source, and the options with which it is packed in order."""
    folder.mkdir(parents=True)
    function, options = FORMATS[form]
    function(folder)
    return folder, {"shuffle_seed": None, **options}


def read_arrays(out: Path) -> list[Any]:
    return [np.load(io.BytesIO(fields["npy"])) for _, fields in sorted(read_packed(out).items())]


def read_documents(out: Path, **options: Any) -> list[list[int]]:
    """Return the tokens of each document from the blocks of PackedTokens. Empty documents are left out."""
    tokens = shardio.PackedTokens(out, 64, **options)
    found = dict[int, list[int]]()
    for index in range(len(tokens)):
        for token, document in zip(*(each.tolist() for each in tokens[index][:2]), strict=True):
            if document >= 0:
                found.setdefault(document, []).append(token)
    return [found[document] for document in sorted(found)]


@pytest.mark.parametrize("form", FORMATS)
def test_each_token_of_each_document_arrives_from_any_format(form: str, tmp_path: Path) -> None:
    source, options = write(form, tmp_path / "in")
    result = pack(source, tmp_path / "out", **options, max_shard_samples=7)
    assert result.manifest.num_samples == len(TOKENS)
    assert result.manifest.fields == ("npy",)
    assert read_documents(tmp_path / "out") == list(filter(None, TOKENS))
    assert read_documents(tmp_path / "out", eos=EOS) == [[*tokens, EOS] for tokens in TOKENS]
    arrays = read_arrays(tmp_path / "out")
    assert {(array.dtype.name, array.ndim) for array in arrays} == {("int32", 1)}
    assert [array.tolist() for array in arrays] == TOKENS


class TestDocuments(PackSourceTests):
    @pytest.fixture(params=FORMATS)
    def form(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)

    @pytest.fixture
    def source(self) -> Documents:
        return Documents()

    @pytest.fixture
    def dataset(self, tmp_path: Path, form: str) -> Path:
        return write(form, tmp_path / "home" / "in")[0]

    @pytest.fixture
    def options(self, form: str) -> PackOptions:
        return PackOptions(**FORMATS[form][1])


@pytest.mark.parametrize("form", ["txt", "jsonl of text", "parquet of text", "safetensors"])
def test_any_number_of_workers_and_a_resumed_pack_give_the_same_bytes(form: str, tmp_path: Path) -> None:
    source, options = write(form, tmp_path / "in")
    script = tmp_path / "encoding.py"
    script.write_text("def encode(text):\n    return list(text.encode())\n")
    options |= {"shuffle_seed": 5, "max_shard_samples": 6, "token_dtype": "uint16"}
    if "tokenizer" in options:
        options["tokenizer"] = f"{script}:encode"
    pack(source, tmp_path / "1", **options)
    if form == "jsonl of text":
        assert exit_code_if_killed(5, "after", pack, source, tmp_path / "2", **options) == -signal.SIGKILL
    else:
        assert_raises(KeyboardInterrupt, None, pack, source, tmp_path / "2", Interrupt(13), **options)
    message, other = "unfinished pack of different images or with different settings", {"token_dtype": "int32"}
    assert_raises(PackError, message, pack, source, tmp_path / "2", **options | other)
    assert 0 < pack(source, tmp_path / "2", **options, num_workers=2).num_kept < len(TOKENS)
    assert read_files(tmp_path / "1") == read_files(tmp_path / "2")
    assert sorted(read_documents(tmp_path / "1")) == sorted(filter(None, TOKENS))


def test_the_tokenizer_may_be_any_function_that_cloudpickle_sends(tmp_path: Path) -> None:
    source, options = write("txt", tmp_path / "in")
    table = dict.fromkeys(range(256), 1)
    options |= {"tokenizer": lambda text: np.array([table[byte] for byte in text.encode()], int), "num_workers": 2}
    pack(source, tmp_path / "out", **options, max_shard_samples=10)
    assert read_documents(tmp_path / "out") == [[1] * len(tokens) for tokens in TOKENS if tokens]


def test_lines_of_json_may_be_written_in_any_way(tmp_path: Path) -> None:
    rows = [{"text": "x" * length, "ids": [length]} for length in (0, 3, 2**21, 5, 2**20 - 30, 1)]
    lines = [json.dumps(row).encode() for row in rows]
    content = b"\xef\xbb\xbf" + lines[0] + b"\r\n\r\n" + b"\n".join([*lines[1:3], b"", *lines[3:]])
    (tmp_path / "a.jsonl").write_bytes(content)
    pack(tmp_path / "a.jsonl", tmp_path / "out", source_kind="documents", shuffle_seed=None)
    assert read_documents(tmp_path / "out") == [row["ids"] for row in rows]
    assert list(read_packed(tmp_path / "out")) == [f"a/{line:08d}" for line in (0, 2, 3, 5, 6, 7)]
    pack(tmp_path / "a.jsonl", tmp_path / "texts", tokenizer=encode, shuffle_seed=None)
    lengths = [len(content["npy"]) - 128 for content in read_packed(tmp_path / "texts").values()]
    assert lengths == [4 * len(str(row["text"])) for row in rows]


def test_keys_come_from_a_column_or_from_names(tmp_path: Path) -> None:
    source, _ = write("parquet of text", tmp_path / "a" / "in.1")
    for number, suffix in enumerate(("parquet", "jsonl")):
        (tmp_path / suffix).mkdir()
        write_rows(tmp_path / suffix, BOTH, suffix)
        pack(tmp_path / suffix, tmp_path / f"out-{number}", **ROWS, key_column="id")
        assert sorted(read_packed(tmp_path / f"out-{number}")) == IDS
    pack(source.parent, tmp_path / "nested", **ROWS)
    assert sorted(read_packed(tmp_path / "nested"))[0] == "in.1/0/00000000"
    pack(tmp_path / "a" / "*" / "1.parquet", tmp_path / "pattern", **ROWS)
    assert sorted(read_packed(tmp_path / "pattern"))[-1] == "in.1/1/00000009"
    save_file({"layer.1": np.arange(3)}, tmp_path / "x.safetensors")
    assert_refused(r"x\.safetensors has 'x/layer\.1' as its name.*Rename .*--rename-dots", tmp_path / "x.safetensors")
    pack(tmp_path / "x.safetensors", tmp_path / "renamed", rename_dots=True)
    assert list(read_packed(tmp_path / "renamed")) == ["x/layer_1"]


def test_the_command_packs_splits_and_appends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write("txt", tmp_path / "in")
    Path("encoding.py").write_text("def encode(text):\n    return list(text.encode())\n")
    run("pack", "in", "out", "--tokenizer", "encoding.py:encode", "--split", "0.5,0.5", "--quiet")
    found = read_documents(tmp_path / "out/train") + read_documents(tmp_path / "out/val")
    assert sorted(found) == sorted(filter(None, TOKENS))
    Path("more").mkdir()
    Path("more/new.txt").write_text("more")
    # Anyone may have written a manifest, so no code that it names is run.
    message = "packed with --tokenizer encoding.py:encode.*: run shardio pack more NEW --tokenizer encoding.py:encode"
    assert_raises(PackError, message, append, "out/train", "more")
    run("pack", "more", "new", "--tokenizer", "encoding.py:encode", "--quiet")
    assert append("out/train", "new").pack["tokenizer"] == "encoding.py:encode"
    assert read_documents(tmp_path / "out/train")[-1] == encode("more")
    np.save("more/tokens.npy", np.arange(3))
    Path("more/new.txt").unlink()
    pack(Path("more"), Path("tokens"), token_dtype="uint16")
    np.save("more/others.npy", np.arange(4))
    Path("more/tokens.npy").unlink()
    append("tokens", "more")
    assert [array.dtype.name for array in read_arrays(tmp_path / "tokens")] == ["uint16", "uint16"]


def test_only_files_of_tokens_are_recognized_without_an_option(tmp_path: Path) -> None:
    source, _ = write("npy", tmp_path / "npy")
    pack(source, tmp_path / "arrays", fields=["npy"])
    assert {array.dtype.name for array in read_arrays(tmp_path / "arrays")} == {"int64", "uint8"}
    assert pack(source / "00.npy", tmp_path / "one").manifest.num_samples == 1
    (source / "notes.md").write_text("notes")
    assert_refused(r"--fields md .*--source-kind documents \(source_kind='documents'\)", source)
    result = pack(source, tmp_path / "beside", **ROWS)
    assert [path.name for path in result.ignored] == ["notes.md"]
    write("txt", tmp_path / "txt")
    assert_refused(r"--fields txt .*--source-kind documents \(source_kind='documents'\)", tmp_path / "txt")
    write("parquet of text", tmp_path / "parquet")
    assert_refused(r"--source-kind parquet .*--source-kind documents", tmp_path / "parquet")


def test_sources_of_images_stay_what_they_are(tmp_path: Path) -> None:
    write_images(tmp_path / "in", classes=1, per_class=3, width=8, height=8)
    np.save(tmp_path / "in" / "0.npy", np.arange(3))
    np.save(tmp_path / "in" / "class-0" / "name-000.npy", np.arange(3))
    assert pack(tmp_path / "in", tmp_path / "out").manifest.fields == ("cls", "jpg", "npy")
    (tmp_path / "in.jsonl").write_text('{"path": "in/class-0/name-000.jpg", "text": "caption", "tokens": [1, 2]}\n')
    assert pack(tmp_path / "in.jsonl", tmp_path / "table").manifest.fields == ("jpg", "json")
    pack(tmp_path / "in.jsonl", tmp_path / "captions", **ENCODE)
    assert read_documents(tmp_path / "captions") == [encode("caption")]
    assert_refused(r"--tokenizer \(tokenizer\) does not apply to .*: omit it", tmp_path / "in/class-0", **ENCODE)
    assert_raises(ValueError, "tokenizer does not apply to an iterable", shardio.pack, [{"npy": 1}], "x", **ENCODE)


def test_splits_are_never_mixed_silently(tmp_path: Path) -> None:
    for name in ("train/0", "train/1", "val/0"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / f"{name}.txt").write_text(name)
    assert_refused("files of the splits train, val", tmp_path / "in", **ENCODE)
    pack(tmp_path / "in", tmp_path / "out", **ENCODE, source_split="train", shuffle_seed=None)
    assert read_documents(tmp_path / "out") == [encode("train/0"), encode("train/1")]


def write_line(row: object) -> Callable[[Path], object]:
    return lambda folder: (folder / "a.jsonl").write_text(f'{{"text": "x", "ids": [1]}}\n{json.dumps(row)}\n')


def write_array(array: Any) -> Callable[[Path], object]:
    return lambda folder: np.save(folder / "a.npy", array)


def write_table(**columns: Any) -> Callable[[Path], object]:
    return lambda folder: pq.write_table(pa.table(columns), folder / "a.parquet")


def write_tensor(array: Any) -> Callable[[Path], object]:
    return lambda folder: save_file({"x": array}, folder / "a.safetensors")


def write_text(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


NEEDS_TOKENIZER = r"--tokenizer encoding\.py:encode \(tokenizer='encoding\.py:encode'\)"

ERRORS: list[tuple[Callable[[Path], object], dict[str, Any], str]] = [
    (write_array(np.ones(3)), {}, r"the document a \(.*a\.npy\) .*must be a one-dim.* shape \(3,\) .*dtype float64"),
    (write_array(np.ones((2, 3), int)), {}, r"the document a \(.*a\.npy\) .* shape \(2, 3\) and dtype int64"),
    (write_array(np.array([5, 70_000])), {"token_dtype": "uint16"}, "document a .*token 70000 .*--token-dtype int32"),
    (write_array(np.array([-1])), {"token_dtype": "uint16"}, "the token -1 does not fit in uint16"),
    (write_array(np.array([2**31])), {}, "the token 2147483648 does not fit in int32"),
    (write_array(np.array([None])), {}, "document a .*cannot be packed: Object arrays cannot be loaded"),
    (write_array(np.arange(3)), ENCODE, r"--tokenizer \(tokenizer\) does not apply to \.npy files: omit it"),
    (write_array(np.arange(3)), {"token_column": "x"}, r"--token-column \(token_column\) does not apply to \.npy"),
    (write_array(np.arange(3)), {"classes": ["a"]}, r"--classes \(classes\) does not apply to \.npy"),
    (write_text("a.npy", b"\x93NUMPY\1"), {}, r"the document a \(.*a\.npy\) cannot be packed"),
    (write_tensor(np.ones(3, "float32")), {}, r"tensor 'x' of .*a\.safetensors has the shape \(3,\) and the type F32"),
    (write_tensor(np.ones((3, 1), int)), {}, r"tensor 'x' of .*a\.safetensors has the shape \(3, 1\)"),
    (write_text("a.safetensors", b"text"), {}, r"a\.safetensors is not an intact safetensors file"),
    (write_text("a.txt", b"text"), ROWS, rf"\.txt files hold text, not tokens\. .*{NEEDS_TOKENIZER}"),
    (write_text("a.txt", b"\xff"), ENCODE, r"a\.txt\) cannot be packed: it is not in UTF-8 .*: save it in UTF-8"),
    (write_text("a.txt", b"x"), {"tokenizer": lambda text: 1 / 0}, r"a\.txt\) .*tokenizer raised ZeroDivisionError"),
    (write_text("a.txt", b"x"), {"tokenizer": lambda text: [0.5]}, r"a\.txt\) .*got list .*dtype float64"),
    (write_text("a.txt", b"x"), {"tokenizer": lambda text: {"ids": [1]}}, r"a\.txt\) .*got dict of shape \(\)"),
    (write_text("a.txt", b"x"), {"tokenizer": "none.py:f"}, "cannot be loaded .*the script .*none.py does not exist"),
    (write_text("a.txt", b"x"), {"tokenizer": "encode"}, "cannot be loaded .*'encode' does not name a function"),
    (write_line({"ids": None}), ROWS, r"the document a/00000001 \(line 2 of .*a\.jsonl\) .* it is null: remove it"),
    (write_line({"text": None}), ENCODE, r"line 2 of .*a\.jsonl\) .* it is null: remove it"),
    (write_line({"ids": [1, "2"]}), ROWS, r"line 2 of .*a\.jsonl\) .* must be a one-dimensional sequence of integers"),
    (write_line({"ids": [[1], [2, 3]]}), ROWS, r"line 2 of .*a\.jsonl\) cannot be packed"),
    (write_line({"ids": "text"}), ROWS, rf"line 2 of .*a\.jsonl\) .*it is text, not tokens.*{NEEDS_TOKENIZER}"),
    (write_line({"text": [1]}), ENCODE, r"line 2 of .*a\.jsonl\) .*it holds tokens instead of text: omit --tokenizer"),
    (write_line({"other": 1}), ROWS, r"line 2 of .*a\.jsonl\) .*it has no 'ids': it has other"),
    (write_line([1]), ROWS, r"line 2 of .*a\.jsonl cannot be read: it must be a JSON object"),
    (write_line({}), {"token_column": "x"}, r"--token-column \(token_column\) names column 'x', but"),
    (write_line({}), ROWS | {"key_column": "x"}, r"--key-column \(key_column\) names column 'x', but"),
    (write_line({}), ROWS | {"key_column": "text"}, r"line 2 of .*a\.jsonl has None in the key column"),
    (write_text("a.json", b"[\n1]"), ROWS, r"line 2 of .*a\.json cannot be read|line 1 of .*a\.json cannot be read"),
    (write_table(text=["x", None]), ENCODE, r"the document a/00000001 \(row 1 of .*a\.parquet\) .*it is null"),
    (write_table(ids=[[1], None]), ROWS, r"row 1 of .*a\.parquet\) .*it is null"),
    (write_table(ids=[[1], [2, None]]), ROWS, r"row 1 of .*a\.parquet\) .*dtype float64"),
    (write_table(ids=[[0.5]]), ROWS, rf"in has no column of lists of integers among ids\. .*{NEEDS_TOKENIZER}"),
    (write_table(text=["x"]), ROWS, rf"in has no column of lists of integers among text\. .*{NEEDS_TOKENIZER}"),
    (write_table(ids=[[1]]), ENCODE, "in has no column of text among ids. .*omit --tokenizer"),
    (write_table(a=[[1]], b=[[1]]), ROWS, r"in has several columns of lists of integers \(a, b\): .*--token-column"),
    (write_text("a.parquet", b"text"), ROWS, "a.parquet|in cannot be"),
    (write_text("a.txt", b""), ROWS | {"layout": "flat"}, r"--layout \(layout\) does not apply to"),
    (write_text("a.md", b""), ROWS, "in is not a set of documents: omit --source-kind documents"),
    (write_text("a.jsonl", b"\n"), ROWS, "in holds no documents|no column"),
]


@pytest.mark.parametrize(("function", "options", "message"), ERRORS)
def test_errors_name_the_document_and_the_remedy(
    function: Callable[[Path], object], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    function(tmp_path / "in")
    assert_refused(message, tmp_path / "in", **options, num_workers=1)
