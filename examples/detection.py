"""Train one of torchvision's detectors: boxes and masks follow the crops and flips of the images.

    python examples/detection.py

The script packs synthetic pictures of discs and squares, with their boxes, classes and masks, and trains FCOS on the
boxes. (The targets also have the masks, as Mask R-CNN expects them.) The transforms run in shardio's worker processes,
and the samples arrive as the tensors that torchvision's models expect.
"""

from __future__ import annotations

import argparse
import importlib
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

import shardio
from shardio.libraries import import_library
from shardio.transforms import BoundingBoxes, ColorJitter, Compose, Mask, RandomHorizontalFlip, RandomResizedCrop

SIDE = 96
CLASSES = ("background", "disc", "square")
FIELDS: dict[str, Any] = {
    "image": "image",
    "mask.png": Mask(),
    "json.boxes": BoundingBoxes(format="xyxy", min_size=4),
    "json.labels": "labels",
    "json.ids": "labels",
}


def draw_scene(draw: np.random.Generator) -> dict[str, Any]:
    """Return a picture, a mask with the number of the object at each pixel, and the objects' boxes and classes."""
    image = draw.integers(0, 60, (SIDE, SIDE, 3), dtype=np.uint8)
    mask, rows, columns = np.zeros((SIDE, SIDE), np.uint8), *np.indices((SIDE, SIDE))
    boxes, labels = list[list[int]](), list[int]()
    for left in (4, 52):  # Each half has one object, so the objects do not overlap.
        size, label = int(draw.integers(20, 36)), int(draw.integers(1, 3))
        top = int(draw.integers(0, SIDE - size))
        is_inside = (columns >= left) & (columns < left + size) & (rows >= top) & (rows < top + size)
        if CLASSES[label] == "disc":
            middle = (size - 1) / 2
            is_inside &= np.hypot(columns - left - middle, rows - top - middle) <= size / 2
        image[is_inside] = draw.integers(120, 256, 3)
        boxes.append([left, top, left + size, top + size])
        labels.append(label)
        mask[is_inside] = len(boxes)
    return {"png": image, "mask.png": mask, "json": {"boxes": boxes, "labels": labels, "ids": [1, 2]}}


def write_scenes(folder: Path, number: int) -> None:
    """Pack scenes."""
    draw = np.random.default_rng(0)
    with shardio.ShardWriter(folder) as writer:
        for index in range(number):
            writer.write({"__key__": f"{index:04d}", **draw_scene(draw)})


def collate(samples: list[Any]) -> tuple[list[torch.Tensor], list[dict[str, torch.Tensor]]]:
    """Return the images, float from 0 to 1, and the targets, in the form that torchvision's detectors expect."""
    images = [image.float() / 255 for image, _, _ in samples]
    targets = [
        {
            "boxes": objects["boxes"],  # float32 [k, 4]
            "labels": objects["labels"],  # int64 [k]
            "masks": (mask == objects["ids"][:, None, None]).to(torch.uint8),  # uint8 [k, height, width]
        }
        for _, mask, objects in samples
    ]
    return images, targets


def make_model() -> Any:
    """Return a small, untrained detector (FCOS, https://arxiv.org/abs/1904.01355)."""
    import_library("torchvision")  # A plain import fails if torchvision and torch were built for different devices.
    detection = importlib.import_module("torchvision.models.detection")
    parts = importlib.import_module("torchvision.models.detection.backbone_utils")
    backbone = parts.mobilenet_backbone(
        backbone_name="mobilenet_v3_large", weights=None, fpn=True, trainable_layers=6, norm_layer=torch.nn.BatchNorm2d
    )
    anchors = detection.anchor_utils.AnchorGenerator(((8,), (16,), (32,)), ((1.0,),) * 3)
    return detection.FCOS(backbone, len(CLASSES), min_size=SIDE, max_size=SIDE, anchor_generator=anchors)


def main() -> None:
    """Pack scenes, and train on them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--scenes", type=int, default=160)
    parser.add_argument("--epochs", type=int, default=3)
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    steps = [RandomResizedCrop(SIDE, scale=(0.7, 1.0)), RandomHorizontalFlip(), ColorJitter(0.2, 0.2, 0.2)]
    with tempfile.TemporaryDirectory() as work:
        write_scenes(Path(work, "scenes"), given.scenes)
        dataset = shardio.ShardDataset(
            Path(work, "scenes"),
            fields=("image", "mask.png", "json"),
            shuffle=True,
            transform=Compose(steps, fields=FIELDS),
        )
        loader = shardio.DataLoader(dataset, batch_size=8, num_workers=2, collate_fn=collate)
        loader.start_workers()
        torch.manual_seed(0)
        model = make_model().to(device).train()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        for epoch in range(given.epochs):
            losses = list[float]()
            for images, targets in loader:
                moved = [{name: each.to(device) for name, each in target.items()} for target in targets]
                loss = sum(model([image.to(device) for image in images], moved).values())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            print(f"epoch {epoch}: {len(losses)} batches, loss {np.mean(losses):.3f}")


if __name__ == "__main__":
    main()
