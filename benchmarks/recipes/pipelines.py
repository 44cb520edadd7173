"""The recipes in torchvision (on Pillow images and on tensors) and in Albumentations, as in typical user code.

All recipes make uint8 images, so the loaders do equal work. In torchvision's own recipe, images are normalized before a
part is erased (set to 0); in the benchmark, the erased part gets the mean color.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import cv2
import numpy as np
import torch
from numpy.typing import NDArray

from shardio.libraries import import_library
from shardio.transforms.recipes import IMAGENET_MEAN

Make = Callable[[Any], Any]
"""A function that makes a sample's image, or a list of crops, from a decoded image."""

SIZE, SMALL = 224, 96
BLUR = {SIZE: 23, SMALL: 9}
"""The size of the blur's kernel for each image size."""


def make_torchvision(recipe: str, *, takes_tensors: bool) -> Make:
    """Return a recipe built from torchvision transforms, for Pillow images or for tensors, uint8 [3, height, width]."""
    import_library("torchvision")
    v2: Any = importlib.import_module("torchvision.transforms.v2")
    finish = [] if takes_tensors else [v2.PILToTensor()]
    if recipe == "resnet50":
        return v2.Compose(  # type: ignore[no-any-return]
            [
                v2.RandomResizedCrop(SIZE, antialias=True),
                v2.RandomHorizontalFlip(),
                v2.TrivialAugmentWide(),
                *finish,
                v2.RandomErasing(0.1, value=list(IMAGENET_MEAN)),
            ]
        )

    def crop(size: int, scale: tuple[float, float], jitter: Sequence[float], blur: float, solarize: float) -> Any:
        cubic = v2.InterpolationMode.BICUBIC
        return v2.Compose(
            [
                v2.RandomResizedCrop(size, scale, interpolation=cubic, antialias=True),
                v2.RandomHorizontalFlip(),
                v2.RandomApply([v2.ColorJitter(*jitter)], p=0.8),
                v2.RandomGrayscale(0.2),
                v2.RandomApply([v2.GaussianBlur(BLUR[size], (0.1, 2.0))], p=blur),
                v2.RandomSolarize(128, p=solarize),
                *finish,
            ]
        )

    return _make_crops(recipe, crop)


def make_albumentations(recipe: str) -> Make:
    """Return a recipe built from Albumentations transforms, for arrays, uint8 [height, width, 3].

    Albumentations has no TrivialAugment, so this function lists the operations of TrivialAugment. Strengths are drawn
    from ranges instead of from 31 fixed values.
    """
    a: Any = importlib.import_module("albumentations")
    finish = importlib.import_module("albumentations.pytorch").ToTensorV2()
    if recipe == "resnet50":
        jitter = {"brightness": (1, 1), "contrast": (1, 1), "saturation": (1, 1), "hue": (0, 0), "p": 1}
        nearest = {"interpolation": cv2.INTER_NEAREST, "p": 1}
        operations = [
            a.NoOp(),
            a.Affine(shear={"x": (-45, 45), "y": (0, 0)}, **nearest),
            a.Affine(shear={"x": (0, 0), "y": (-45, 45)}, **nearest),
            a.Affine(translate_px={"x": (-32, 32), "y": (0, 0)}, **nearest),
            a.Affine(translate_px={"x": (0, 0), "y": (-32, 32)}, **nearest),
            a.Rotate((-135, 135), **nearest),
            a.ColorJitter(**{**jitter, "brightness": (0.01, 1.99)}),
            a.ColorJitter(**{**jitter, "saturation": (0.01, 1.99)}),
            a.ColorJitter(**{**jitter, "contrast": (0.01, 1.99)}),
            a.Sharpen(p=1),
            a.Posterize((2, 7), p=1),
            a.Solarize((0.0, 1.0), p=1),
            a.AutoContrast(p=1),
            a.Equalize(p=1),
        ]
        crop = [a.RandomResizedCrop((SIZE, SIZE)), a.HorizontalFlip(), a.OneOf(operations, p=1)]
        erase = a.Erasing(scale=(0.02, 0.33), ratio=(0.3, 3.3), fill=IMAGENET_MEAN, p=0.1)
        pipeline = a.Compose([*crop, erase, finish])
        return lambda image: pipeline(image=image)["image"]

    def crop_of(size: int, scale: tuple[float, float], jitter: Sequence[float], blur: float, solarize: float) -> Any:
        ranges = [(1 - strength, 1 + strength) for strength in jitter[:3]]
        pipeline = a.Compose(
            [
                a.RandomResizedCrop((size, size), scale, interpolation=cv2.INTER_CUBIC),
                a.HorizontalFlip(),
                a.ColorJitter(*ranges, hue=(-jitter[3], jitter[3]), p=0.8),
                a.ToGray(p=0.2),
                a.GaussianBlur((BLUR[size], BLUR[size]), (0.1, 2.0), p=blur),
                a.Solarize((0.5, 0.5), p=solarize),
                finish,
            ]
        )
        return lambda image: pipeline(image=image)["image"]

    return _make_crops(recipe, crop_of)


def _make_crops(recipe: str, crop: Callable[..., Any]) -> Make:
    """Return the crops of SimCLR or DINO, given a function that makes the pipeline of one crop."""
    if recipe == "simclr":
        views = [crop(SIZE, (0.08, 1.0), (0.8, 0.8, 0.8, 0.2), 0.5, 0.0)] * 2
    else:
        jitter = (0.4, 0.4, 0.2, 0.1)
        large = [crop(SIZE, (0.4, 1.0), jitter, 1.0, 0.0), crop(SIZE, (0.4, 1.0), jitter, 0.1, 0.2)]
        views = [*large, *[crop(SMALL, (0.05, 0.4), jitter, 0.5, 0.0)] * 8]
    return lambda image: [view(image) for view in views]


def decode_pillow(content: bytes) -> Any:
    """Return a Pillow image."""
    import io

    from PIL import Image

    return Image.open(io.BytesIO(content)).convert("RGB")


def decode_opencv(content: bytes) -> NDArray[np.uint8]:
    """Return an image, uint8 [height, width, 3]."""
    flags = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
    return np.asarray(cv2.imdecode(np.frombuffer(content, np.uint8), flags), np.uint8)


def decode_tensor(content: bytes) -> torch.Tensor:
    """Return an image, uint8 [3, height, width]. OpenCV is as fast as torchvision's decoder, which may be missing."""
    return torch.from_numpy(decode_opencv(content)).permute(2, 0, 1)
