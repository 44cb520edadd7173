"""Non-ASCII names under an ASCII locale, and names that are not UTF-8 under a UTF-8 locale."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import shardio
from shardio.packing import PackSettings, pack_source
from tests.files import read_files
from tests.sources import encode

NAMES = ["Müller/größe.jpg", "Müller/b.jpg", "日本/写真.jpg", "日本/x.jpg", "plain/a.jpg", "plain/ü.jpg", "plain/é.txt"]

C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}

COMMANDS = """
import sys
from shardio.cli.main import main
assert sys.getfilesystemencoding() == "ascii" and sys.stdout.encoding == "ascii", sys.getfilesystemencoding()
for command in (
    "pack Bilder übung", "pack Bilder übung", "info übung",
    "bench übung --num-workers 1", "bench Bilder --num-workers 0"
):
    sys.argv = ["shardio", *command.encode().decode("ascii", "surrogateescape").split()]
    print("$", *sys.argv[1:], flush=True)
    try:
        main()
    except SystemExit as end:
        print("ended", end.code, flush=True)
import shardio
folder = shardio.ImageFolder("Bilder")  # In a script, names are plain text.
shards = shardio.ShardMapDataset("übung", fields=("image", "key", "label"), classes=folder)
packed = shardio.pack("Bilder", "weitere/übung")
assert len(shardio.ShardDataset("weitere/übung/shard-{000000..000000}.tar")) == 6
print(ascii([folder.digest, folder.classes, shards.classes, sorted(shards[n][1:] for n in range(6))]))
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("locales")
    for i, name in enumerate(NAMES):
        (root / "Bilder" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "Bilder" / name).write_bytes(encode(i))
    return root


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS names files in UTF-8 under every locale")
def test_the_c_locale_changes_nothing(root: Path) -> None:
    environment = {**os.environ, **C_LOCALE}
    (root / "commands.py").write_text(COMMANDS, encoding="utf-8")
    command = [sys.executable, "commands.py"]
    found = subprocess.run(command, cwd=root, env=environment, check=False, capture_output=True, timeout=300)
    output, errors = found.stdout.decode(), found.stderr.decode()  # All of it is UTF-8.
    assert found.returncode == 0, errors
    _, packed, refused, info, of_shards, of_folder = output.split("$ ")
    assert packed.startswith("pack Bilder übung\npacked 6 samples of 3 classes")
    assert packed.endswith("ended 0\n")
    assert "ignored (not part of any sample):\n  Bilder/plain/é.txt" in errors
    assert refused.endswith("ended 1\n")
    assert "übung already holds a packed dataset" in errors
    assert "classes  3: Müller, plain, 日本" in info
    assert "6 samples in 1 batch" in of_shards
    assert "6 samples in 1 batch" in of_folder
    assert "Traceback" not in errors

    folder = shardio.ImageFolder(root / "Bilder")
    shardio.pack(root / "Bilder", root / "expected")
    assert read_files(root / "übung") == read_files(root / "weitere" / "übung") == read_files(root / "expected")
    expected = shardio.ShardMapDataset(root / "expected", fields=("key", "label"))
    samples = sorted(expected[index] for index in range(6))
    assert output.splitlines()[-1] == ascii([folder.digest, folder.classes, folder.classes, samples])
    assert folder.classes == ["Müller", "plain", "日本"]


def test_a_name_that_is_not_utf8_is_printed_as_its_bytes(tmp_path: Path) -> None:
    """In UTF-8 mode, Python's standard output refuses surrogate escapes by default."""
    (tmp_path / "in" / "c").mkdir(parents=True)
    (tmp_path / "in" / "c" / "a.jpg").write_bytes(encode(1))
    odd = os.fsdecode(b"gr\xfc\xdfe.txt")
    try:
        (tmp_path / "in" / "c" / odd).write_text("Latin-1")
    except OSError:
        return  # macOS has no such names.
    command = [sys.executable, "-X", "utf8", "-m", "shardio", "pack", str(tmp_path / "in"), str(tmp_path / "out")]
    done = subprocess.run(command, check=False, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert b"in/c/gr\xfc\xdfe.txt\n" in done.stderr
    assert json.loads((tmp_path / "out" / "shardio.json").read_text())["classes"] == ["c"]
    assert pack_source(tmp_path / "in", tmp_path / "again", PackSettings(max_shard_size=1 << 20)).ignored
