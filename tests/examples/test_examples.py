"""Every example runs in its own process and shows the promised results."""

from __future__ import annotations

import json
import re
import tarfile
import warnings
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.faults.worker_processes import wait_until
from tests.processes import run_python, start_python
from tests.sources import write_images

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))


def _run(script: str | Path, *options: str | Path, status: int = 0) -> str:
    done = run_python(ROOT / "examples" / script, *options, prepare=_prepare)
    assert (done.stderr, done.returncode) == ("", status), done.stdout
    return done.stdout


def _prepare() -> None:
    warnings.simplefilter("error")
    # Only torch's warning about more workers than cores is allowed, because some machines have few cores.
    warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
    # torch 2.6 removes a temporary directory only when Python exits.
    if torch.__version__ < "2.7":  # torch compares this string as a version number.
        warnings.filterwarnings("ignore", "Implicitly cleaning up", ResourceWarning)
    torch.set_num_threads(1)  # With such small models, more threads would wait for each other.


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--own-loop",)], ids=["train", "own-loop"])
def test_the_checkerboard_is_learnt_equally_well_in_both_precisions(options: tuple[str, ...]) -> None:
    output = _run("checkerboard.py", "--epochs", "4", "--width", "48", *options)
    found = {name: float(share) for name, share in re.findall(r"^(fp32|bf16|fp16) +([\d.]+)%", output, re.MULTILINE)}
    assert list(found) == ["fp32", "fp16" if torch.cuda.is_available() else "bf16"]
    assert min(found.values()) > 95
    assert "the results agree" in output
    assert ("times as fast" in output) == torch.cuda.is_available()


@pytest.mark.slow
def test_the_checkerboard_fails_if_the_results_differ(tmp_path: Path) -> None:
    """An impossible tolerance shows that the comparison can fail."""
    script = tmp_path / "strict.py"
    script.write_text("from examples import checkerboard\ncheckerboard.TOLERANCE = -1\ncheckerboard.main()\n")
    assert "DO NOT agree" in _run(script, "--epochs", "1", "--width", "8", status=1)


@pytest.mark.slow
def test_a_folder_is_packed_and_training_resumes_in_a_second_run(tmp_path: Path) -> None:
    images, out = tmp_path / "images", tmp_path / "out"
    write_images(images, classes=3, per_class=8)
    output = _run("folder_to_shards.py", images, out, "--precision", "fp32", "--epochs", "1")
    assert "packed 24 images into 8 shards" in output
    assert re.findall(r"^epoch (\d+)", output, re.MULTILINE) == ["0"]
    times = [path.stat().st_mtime_ns for path in (out / "packed").glob("*.tar")]
    output = _run("folder_to_shards.py", images, out, "--precision", "fp32", "--epochs", "2")
    assert re.match(r"(?!.*packed)(?s:.*)\(complete epochs: 1\)", output)
    assert re.findall(r"^epoch (\d+)", output, re.MULTILINE) == ["1"]
    assert [path.stat().st_mtime_ns for path in (out / "packed").glob("*.tar")] == times
    assert {"last.pt", "best.pt", "log.jsonl", "report.html"} <= {path.name for path in (out / "run").iterdir()}
    lines = map(json.loads, (out / "run" / "log.jsonl").read_text().splitlines())
    # Two of the eight shards, with three images each, are held out.
    assert [line["num_images"] for line in lines if line["kind"] == "epoch"] == [18, 18]


@pytest.mark.slow
def test_without_images_the_example_creates_and_learns_some(tmp_path: Path) -> None:
    output = _run("folder_to_shards.py", tmp_path, "--precision", "fp32", "--epochs", "2")
    assert "packed 300 images into 10 shards" in output
    first, last = map(float, re.findall(r"val accuracy ([\d.]+)%", output))
    assert max(first, last) > 60  # Guessing gives 33.


@pytest.mark.slow
def test_a_killed_run_of_the_resnet50_recipe_resumes_with_the_same_losses(tmp_path: Path) -> None:
    def read_losses(out: Path) -> list[tuple[object, ...]]:
        lines = map(json.loads, (out / "run" / "log.jsonl").read_text().splitlines())
        return [(line["kind"], line.get("step"), line["loss"], line.get("val_loss")) for line in lines]

    script, options = "resnet50_recipe.py", ("--epochs", "1", "--batch-size", "24")
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    _run(script, undisturbed, *options)
    log = killed / "run" / "log.jsonl"
    example, output, errors = ROOT / "examples" / script, tmp_path / "output", tmp_path / "errors"
    process = start_python(example, killed, *options, prepare=_prepare, output=output, errors=errors)
    wait_until(lambda: log.exists() and len(log.read_text().splitlines()) >= 6, "it has logged 6 lines")
    process.kill()
    process.join()
    assert len(read_losses(killed)) < len(read_losses(undisturbed))
    assert "resum" in _run(script, killed, *options)
    assert read_losses(killed) == read_losses(undisturbed)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torchvision") is None, reason="torchvision is not installed")
def test_a_detector_of_torchvision_learns() -> None:
    output = _run("detection.py", "--scenes", "64", "--epochs", "2")
    first, last = map(float, re.findall(r"^epoch \d: 8 batches, loss ([\d.]+)$", output, re.MULTILINE))
    assert last < first


@pytest.mark.slow
def test_each_dataset_gives_the_same_samples_in_each_loader() -> None:
    output = _run("iterable_and_map.py")
    lines = re.findall(r"^(\w+) in (\w+)'s loader +80 samples, each exactly once; loss ([\d.]+)$", output, re.MULTILINE)
    datasets = ["ShardDataset", "ShardMapDataset", "ImageFolder"]
    assert [line[:2] for line in lines] == [(dataset, name) for name in ("shardio", "torch") for dataset in datasets]
    sharded, mapped, _, *others = losses = [loss for *_, loss in lines]
    assert (sharded, others) == (mapped, losses[:3])


@pytest.mark.slow
def test_code_of_each_kind_gives_the_same_batches_with_and_without_worker_processes() -> None:
    output = _run("own_code.py")
    names = re.findall(r"^(.*): 8 batches, equal with 0 and 2 workers$", output, re.MULTILINE)
    libraries = ["torchvision on tensors", "torchvision on Pillow images"] if find_spec("torchvision") else []
    libraries += ["Albumentations"] if find_spec("albumentations") else []
    assert names == ["a function", *libraries, "transform_sample", "decoders", "collate_fn"]


@pytest.mark.slow
def test_an_interrupted_epoch_of_a_tar_resumes() -> None:
    output = _run("webdataset_tar.py")
    assert "interrupted after 7 of 15 batches" in output
    assert '"position": 56' in output
    assert re.search(r"the brightness of \d+ is \d+", output)
    assert re.search(r"resumed and continued to batch 15, loss [\d.]+: 120 samples, each exactly once", output)


def test_the_tar_is_the_same_without_webdataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("webdataset")
    example = import_module("examples.webdataset_tar")

    def write_and_read(name: str) -> dict[str, bytes]:
        example.write_tar(tmp_path / name)
        with tarfile.open(tmp_path / name) as tar:
            return {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]

    by_webdataset = write_and_read("a.tar")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert write_and_read("b.tar") == by_webdataset
    assert len(by_webdataset) == 360


def test_the_readme_names_every_example() -> None:
    readme = (ROOT / "examples" / "README.md").read_text()
    assert re.findall(r"python examples/(\w+\.py)", readme) == EXAMPLES


def test_a_killed_run_over_a_changing_mixture_has_the_losses_of_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = _run("annealed_mixture.py", tmp_path / "whole").splitlines()
    begun = _run("annealed_mixture.py", tmp_path / "killed", "--kill-at", "27", status=-9).splitlines()
    resumed = _run("annealed_mixture.py", tmp_path / "killed").splitlines()
    assert resumed[0] == "resumed after step 20"
    assert begun[:20] + resumed[1:] == whole
    assert len(whole) == 60
