"""``shardio mix``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from shardio import MixedDataset, ShardDataset, ShardWriter
from tests.cli.commands import error_of, run, usage_error


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    found = {}
    for name, num_samples in (("web", 40), ("code", 12)):
        path = tmp_path_factory.mktemp(name) / "packed"
        with ShardWriter(path) as writer:
            for number in range(num_samples):
                writer.write({"__key__": f"{name}-{number}", "txt": name})
        found[name] = str(path)
    return found


def write(path: Path, folders: dict[str, str], given: dict[str, float] | None, **others: Any) -> Path:
    sources: dict[str, dict[str, Any]] = {name: {"path": folder} for name, folder in folders.items()}
    for name, weight in (given or {}).items():
        sources[name]["weight"] = weight
    path.write_text(json.dumps({"sources": sources, **others}))
    return path


@pytest.mark.parametrize("name", ["mixture.json", "mixture.yaml"])  # JSON is valid YAML.
def test_the_table_says_what_the_loader_delivers(name: str, folders: dict[str, str], tmp_path: Path) -> None:
    weights = {"web": 0.75, "code": 0.25}
    path = write(
        tmp_path / name, folders, weights, stop="longest", global_batch_size=4, at={"6": {"code": 1, "web": 1}}
    )
    plot = tmp_path / "mixture.png"
    lines = run("mix", path, "--plot", plot).stdout.splitlines()
    sources = {each: (ShardDataset(folder, fields="key"), weights[each]) for each, folder in folders.items()}
    mix = MixedDataset(sources, stop="longest", global_batch_size=4, shuffle=False, batch_size=4)
    keys = list(mix.at(6, {"code": 1, "web": 1}))
    assert lines[0] == f"an epoch has {len(keys)} samples = {-(-len(keys) // 4)} steps"
    for line in lines[3:]:
        source, num_samples, share, num_drawn, times, *repeat = line.split()
        own = [key for key in keys if key.startswith(source)]
        assert (len(own), len(set(own))) == (int(num_drawn), int(num_samples))
        assert share == f"{len(own) / len(keys):.2%}"
        assert times == f"{len(own) / len(set(own)):.2f}"
        first = next((row for row, key in enumerate(keys) if key in keys[:row] and key.startswith(source)), None)
        expected = "never in epoch 0" if first is None else f"sample {first} (step {first // 4})"
        assert " ".join(repeat) == expected
    with Image.open(plot) as image:
        assert image.size == (1200, 840)


def test_sizes_decide_the_weights_on_request(folders: dict[str, str], tmp_path: Path) -> None:
    path = write(tmp_path / "mixture.json", folders, None, weights="proportional", stop="all-once")
    rows = [line.split() for line in run("mix", path).stdout.splitlines()[3:]]
    assert [(row[0], row[3], row[4]) for row in rows] == [("web", "40", "1.00"), ("code", "12", "1.00")]


def test_what_is_wrong_is_named(folders: dict[str, str], tmp_path: Path) -> None:
    weights = {"web": 1.0, "code": 1.0}
    path = tmp_path / "mixture.json"
    refused: dict[str, Any] = {
        "'code' has no weight": write(path, folders, {"web": 1.0}).read_text(),
        "contradict each other": write(path, folders, weights, weights="proportional").read_text(),
        "at names 'cod'": write(path, folders, weights, at={"3": {"cod": 1}}, global_batch_size=2).read_text(),
        "needs global_batch_size": write(path, folders, weights, batches="pure").read_text(),
        "less than a millionth": write(path, folders, {"web": 1.0, "code": 1e-8}).read_text(),
    }
    for message, text in refused.items():
        path.write_text(text)
        assert message in usage_error("mix", path)
    damaged = {"steps: Extra inputs": write(path, folders, weights, steps=3).read_text(), "cannot be read": "{"}
    for message, text in damaged.items():
        path.write_text(text)
        assert message in error_of("mix", path)
    assert "does not exist" in usage_error("mix", tmp_path / "other.yaml")
