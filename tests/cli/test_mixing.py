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
    later, plot = {"code": 1, "web": 1}, tmp_path / "mixture.png"
    path = write(tmp_path / name, folders, weights, stop="longest", global_batch_size=4, at={"6": later})
    lines = run("mix", path, "--plot", plot).stdout.splitlines()
    sources = {each: (ShardDataset(folder, fields="key"), weights[each]) for each, folder in folders.items()}
    mix = MixedDataset(sources, stop="longest", global_batch_size=4, shuffle=False, batch_size=4)
    keys = list(mix.at(6, later))
    assert lines[0] == f"an epoch has {len(keys)} samples = {-(-len(keys) // 4)} steps"
    for line in lines[3:]:
        source, num_samples, share, num_drawn, times, *repeat = line.split()
        own = [key for key in keys if key.startswith(source)]
        assert (len(own), len(set(own))) == (int(num_drawn), int(num_samples))
        assert (share, times) == (f"{len(own) / len(keys):.2%}", f"{len(own) / len(set(own)):.2f}")
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
    path, weights = tmp_path / "mixture.json", {"web": 1.0, "code": 1.0}
    refused: list[tuple[str, dict[str, float], dict[str, Any]]] = [
        ("'code' has no weight", {"web": 1.0}, {}),
        ("contradict each other", weights, {"weights": "proportional"}),
        ("'at' refers to 'cod'", weights, {"at": {"3": {"cod": 1}}, "global_batch_size": 2}),
        ("needs global_batch_size", weights, {"batches": "pure"}),
        ("less than a millionth", {"web": 1.0, "code": 1e-8}, {}),
    ]
    for message, given, others in refused:
        assert message in usage_error("mix", write(path, folders, given, **others))
    assert "steps: Extra inputs" in error_of("mix", write(path, folders, weights, steps=3))
    path.write_text("{")
    assert "cannot be read" in error_of("mix", path)
    assert "does not exist" in usage_error("mix", tmp_path / "other.yaml")
