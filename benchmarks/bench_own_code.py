"""Compare the speeds of loaders that run the same user code.

``python -m benchmarks.bench_own_code PHOTOS`` makes random 224×224 crops of photographs with typical user code: a
function, pipelines from torchvision and Albumentations, a ``collate_fn``, and a tokenizer. Each loader calls the same
code on the same kind of image, in two workers. Loaders take turns, one epoch each. Rates (images/s) are measured in
wall-clock time. CPU time is that of the process and its children.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import cv2
import numpy as np
import torch
import torch.utils.data
import typer
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import BatchSampler, RandomSampler, default_collate

import shardio
from benchmarks.loaders.job import Repeated
from shardio.libraries import import_library
from shardio.transforms import Compose, RandomHorizontalFlip, RandomResizedCrop

NUM_WORKERS = 2
BATCH_SIZE = 64
SIZE = 224

Pixels = NDArray[np.uint8]
Make = Callable[[Any], Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """User code to measure.

    Attributes:
        goal: The factor by which shardio, with tiled shards, should be faster than the fastest peer.
        make: A function that makes a sample from a whole image, for loaders that decode whole images.
        takes_pillow: Whether the image is a Pillow image rather than an array.
        collate: A function that makes a batch.
        of_dataset: Arguments for shardio's dataset.
        of_loader: Arguments for shardio's loader.
    """

    goal: float
    make: Make
    takes_pillow: bool = False
    collate: Make = default_collate
    of_dataset: dict[str, Any]
    of_loader: dict[str, Any] = field(default_factory=dict)


def crop_and_flip(image: Pixels) -> Pixels:
    """Crop, resize and flip an image with numpy and OpenCV, as typical user code does."""
    height, width = image.shape[:2]
    share = np.random.uniform(0.3, 1.0) ** 0.5
    new_height, new_width = int(height * share), int(width * share)
    top, left = np.random.randint(0, height - new_height + 1), np.random.randint(0, width - new_width + 1)
    resized = cv2.resize(image[top : top + new_height, left : left + new_width], (SIZE, SIZE))
    return np.ascontiguousarray(resized[:, ::-1] if np.random.rand() < 0.5 else resized, dtype=np.uint8)


def brighten(image: Pixels) -> NDArray[np.float32]:
    """Change the brightness of a crop."""
    return image.astype(np.float32) * np.float32(np.random.uniform(0.8, 1.2) / 255)


def tokenize(sample: dict[str, Any]) -> dict[str, Any]:
    """Replace a sample's label with the tokens of a short caption made from it."""
    words = f"a photograph of class {sample['label']}, number {random.randrange(10)}".split()
    tokens = np.zeros(77, np.int64)
    tokens[: len(words)] = [sum(word.encode()) for word in words]
    return {"image": sample["image"], "tokens": tokens}


def mix(samples: list[Any]) -> Any:
    """Collate a batch and mix each image with another image."""
    images, labels = default_collate(samples)
    share = float(np.random.beta(0.2, 0.2))
    images = images.float().div_(255)
    return images.lerp(images.flip(0), share), labels


def as_tensor(image: Pixels) -> torch.Tensor:
    """Return an array as a tensor [3, height, width]."""
    return torch.from_numpy(image).permute(2, 0, 1)


def make_cases() -> dict[str, Case]:
    """Return all cases by name."""
    import_library("torchvision")
    v2, albumentations = importlib.import_module("torchvision.transforms.v2"), importlib.import_module("albumentations")
    crop = Compose([RandomResizedCrop(SIZE), RandomHorizontalFlip()])
    tensors = v2.Compose([v2.RandomResizedCrop(SIZE), v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True)])
    pictures = v2.Compose([v2.RandomResizedCrop(SIZE), v2.RandomHorizontalFlip(), v2.PILToTensor()])
    pipeline = albumentations.Compose(
        [
            albumentations.RandomResizedCrop((SIZE, SIZE)),
            albumentations.HorizontalFlip(),
            albumentations.ColorJitter(p=1),
        ]
    )
    return {
        "a function that crops": Case(
            goal=1.0, make=lambda image: as_tensor(crop_and_flip(image)), of_dataset={"transform": crop_and_flip}
        ),
        "shardio's crop, then a function": Case(
            goal=2.5,
            make=lambda image: torch.from_numpy(brighten(crop_and_flip(image))),
            of_dataset={"transform": Compose([crop, brighten])},
        ),
        "torchvision v2 on Pillow images": Case(
            goal=1.3, make=pictures, takes_pillow=True, of_dataset={"transform": pictures, "decode": "pil"}
        ),
        "torchvision v2 on tensors": Case(
            goal=1.0, make=lambda image: tensors(as_tensor(image)), of_dataset={"transform": tensors}
        ),
        "Albumentations with ColorJitter": Case(
            goal=1.8, make=lambda image: as_tensor(pipeline(image=image)["image"]), of_dataset={"transform": pipeline}
        ),
        "a collate_fn": Case(
            goal=1.0,
            make=lambda image: as_tensor(crop_and_flip(image)),
            collate=mix,
            of_dataset={"transform": crop},
            of_loader={"collate_fn": mix},
        ),
        "a tokenizing transform_sample": Case(
            goal=1.0,
            make=lambda image: tokenize({"image": as_tensor(crop_and_flip(image)), "label": 3}),
            of_dataset={"transform": crop, "transform_sample": tokenize},
        ),
    }


@dataclass(frozen=True)
class Files(torch.utils.data.Dataset[Any]):
    """A typical map-style dataset of photographs. A sample is (the case's result, label), or a dict."""

    paths: list[Path]
    case: Case

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        made = self.case.make(_decode(self.paths[index].read_bytes(), self.case))
        return made if isinstance(made, dict) else (made, 3)


def _decode(content: bytes, case: Case) -> Any:
    if case.takes_pillow:
        return Image.open(io.BytesIO(content)).convert("RGB")
    return cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR_RGB)


def find_loaders(case: Case, folder: Path, tiled: Path) -> Iterator[tuple[str, Iterable[Any]]]:
    """Yield the name and the loader of each candidate in a case."""
    cv2.setNumThreads(0)
    files = Files([path for path, _ in map(_path_of, shardio.ImageFolder(folder).samples)], case)
    options: dict[str, Any] = {"num_workers": NUM_WORKERS, "persistent_workers": True}
    directory = shardio.ImageFolder(folder, **case.of_dataset)
    sampler = shardio.EpochSampler(directory)
    yield "shardio, directory", shardio.DataLoader(directory, BATCH_SIZE, sampler=sampler, **options, **case.of_loader)
    shards = shardio.ShardDataset(tiled, shuffle=True, **case.of_dataset)
    yield "shardio, tiled", shardio.DataLoader(shards, BATCH_SIZE, **options, **case.of_loader)
    yield (
        "DataLoader",
        torch.utils.data.DataLoader(files, BATCH_SIZE, shuffle=True, collate_fn=case.collate, **options),
    )
    batches = BatchSampler(RandomSampler(files), BATCH_SIZE, drop_last=False)

    def load(indices: list[int]) -> Any:
        return case.collate([files[index] for index in indices])

    nodes: Any = importlib.import_module("torchdata.nodes")
    node = nodes.ParallelMapper(nodes.SamplerWrapper(batches), load, num_workers=NUM_WORKERS, method="thread")
    yield "torchdata.nodes", nodes.Loader(nodes.Prefetcher(node, prefetch_factor=2), restart_on_stop_iteration=True)
    if importlib.util.find_spec("spdl"):
        yield "SPDL", Repeated(partial(_run_spdl, batches, load))
    yield "WebDataset", _make_webdataset(case, tiled, options)


def _path_of(sample: tuple[str, int]) -> tuple[Path, int]:
    return Path(sample[0]), sample[1]


def _run_spdl(batches: BatchSampler, load: Make) -> Iterator[Any]:
    pipeline: Any = importlib.import_module("spdl.pipeline")
    builder = pipeline.PipelineBuilder().add_source(batches)
    builder = builder.pipe(load, concurrency=NUM_WORKERS, output_order="input").add_sink(3)
    built = builder.build(num_threads=NUM_WORKERS, use_thread_output_queue=True)
    with built.auto_stop():
        yield from built.get_iterator()


def _make_webdataset(case: Case, shards: Path, options: dict[str, Any]) -> Iterable[Any]:
    wds: Any = importlib.import_module("webdataset")
    paths = sorted(map(str, shards.glob("*.tar")))

    def make(sample: tuple[bytes, bytes]) -> Any:
        made = case.make(_decode(sample[0], case))
        return made if isinstance(made, dict) else (made, int(sample[1]))

    dataset = wds.WebDataset(paths, shardshuffle=len(paths), seed=0).shuffle(1000).to_tuple("jpg", "cls").map(make)
    return wds.WebLoader(dataset.batched(BATCH_SIZE, collation_fn=case.collate), batch_size=None, **options)  # type: ignore[no-any-return]


def measure(loader: Iterable[Any]) -> tuple[float, float]:
    """Load an epoch; return images/s, and the CPU time of all processes in µs per image."""
    began, cpu_before, num_images = time.perf_counter(), cpu_s(), 0
    for batch in loader:
        num_images += len(batch["image"] if isinstance(batch, dict) else batch[0])
    return num_images / (time.perf_counter() - began), 1e6 * (cpu_s() - cpu_before) / num_images


def cpu_s() -> float:
    """Return the CPU time of this process and its children so far, in seconds."""
    psutil: Any = importlib.import_module("psutil")
    here = psutil.Process()
    times = [each.cpu_times() for each in (here, *here.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


def main(
    photos: Annotated[Path, typer.Argument(help="Class folders of JPEGs.")],
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    samples: Annotated[int, typer.Option(min=1, help="Number of samples; photos are repeated to reach it.")] = 1140,
    case: Annotated[list[str] | None, typer.Option(help="Run only this case. Repeatable.")] = None,
) -> None:
    """Print the table."""
    cases = make_cases()
    with tempfile.TemporaryDirectory(prefix="shardio-own-code-") as work:
        folder = repeat_photos(photos, Path(work) / "folder", samples)
        shardio.pack(folder, Path(work) / "tiled", jpeg="tile", max_shard_samples=100)
        print(f"{samples} samples, {NUM_WORKERS} workers, medians of {rounds} rounds\n")
        for name in case or cases:
            print_case(name, cases[name], folder, Path(work) / "tiled", rounds)


def repeat_photos(photos: Path, folder: Path, num_samples: int) -> Path:
    """Link photographs into class folders, repeatedly if there are too few."""
    paths = sorted(path for path in photos.glob("*/*") if path.suffix.lower() in (".jpg", ".jpeg"))
    for number in range(num_samples):
        source = paths[number % len(paths)]
        link = folder / source.parent.name / f"{number:06d}.jpg"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(source.resolve())
    return folder


def print_case(name: str, case: Case, folder: Path, tiled: Path, rounds: int) -> None:
    """Measure a case and print its rows."""
    loaders = dict(find_loaders(case, folder, tiled))
    figures: dict[str, list[tuple[float, float]]] = {each: [] for each in loaders}
    for number in range(rounds + 1):  # The first round is a warm-up.
        for each, loader in loaders.items():
            measured = measure(loader)
            if number:
                figures[each].append(measured)
    speeds = {each: statistics.median(speed for speed, _ in found) for each, found in figures.items()}
    best = max(speed for each, speed in speeds.items() if not each.startswith("shardio"))
    print(f"| {name} (goal {case.goal} ×) | images/s | spread | CPU µs per image | × fastest peer |")
    print("|---|---|---|---|---|")
    for each, found in figures.items():
        spread = f"{min(speed for speed, _ in found):,.0f} to {max(speed for speed, _ in found):,.0f}"
        cpu_us = statistics.median(cpu for _, cpu in found)
        print(f"| {each} | {speeds[each]:,.0f} | {spread} | {cpu_us:,.0f} | {speeds[each] / best:.2f} |")
    print(flush=True)


if __name__ == "__main__":
    typer.run(main)
