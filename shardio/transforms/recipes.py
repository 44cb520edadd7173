"""Build well-known pipelines by name. Use them as they are, or copy and change them.

>>> from shardio.transforms import recipes
>>> transform = recipes.trivial_augment()

The pipelines resize by averaging (``antialias=True``), and give the same pixels as torchvision and Pillow. The results
are uint8 images, to be normalized on the device with ``DevicePrefetcher(normalize=...)``.
"""

from __future__ import annotations

from collections.abc import Callable

from shardio.transforms.automatic import RandAugment, TrivialAugmentWide
from shardio.transforms.compose import Compose, MultiCrop, RandomApply
from shardio.transforms.geometry import CenterCrop, RandomCrop, RandomHorizontalFlip, RandomResizedCrop, Resize
from shardio.transforms.pixels import ColorJitter, GaussianBlur, RandomErasing, RandomGrayscale, RandomSolarize

IMAGENET_MEAN = (124, 116, 104)
"""The mean color of ImageNet, rounded: 255 × (0.485, 0.456, 0.406)."""


def imagenet_train(size: int = 224) -> Compose:
    """Return the usual training pipeline for ImageNet: random crops and flips."""
    return Compose([RandomResizedCrop(size, antialias=True), RandomHorizontalFlip()])


def imagenet_eval(size: int = 224, resize: int | None = None) -> Compose:
    """Return a pipeline that resizes the shorter side (to 8/7 of ``size`` by default) and crops the center."""
    return Compose([Resize(size * 8 // 7 if resize is None else resize, antialias=True), CenterCrop(size)])


def trivial_augment(size: int = 176) -> Compose:
    """Return the pipeline with which torchvision trained its second ResNet-50 weights, IMAGENET1K_V2.

    Evaluate with ``imagenet_eval(224, resize=232)``. The recipe also has MixUp, CutMix and label smoothing (0.1), which
    are not part of a sample's transform: see ``shardio.device``. Source: PyTorch's blog, "How to train state-of-the-art
    models using TorchVision's latest primitives", 2021.
    """
    return Compose(
        [
            RandomResizedCrop(size, antialias=True),
            RandomHorizontalFlip(),
            TrivialAugmentWide(),
            RandomErasing(0.1, value=IMAGENET_MEAN),  # Normalize turns this color into 0.
        ]
    )


def randaugment(size: int = 224, num_ops: int = 2, magnitude: int = 9) -> Compose:
    """Return a training pipeline of random crops, flips and RandAugment (arxiv.org/abs/1909.13719)."""
    return Compose([RandomResizedCrop(size, antialias=True), RandomHorizontalFlip(), RandAugment(num_ops, magnitude)])


def simclr(size: int = 224, strength: float = 1.0) -> MultiCrop:
    """Return a pipeline that makes the two views of SimCLR (arxiv.org/abs/2002.05709, appendix A).

    Args:
        size: The size of both views in pixels.
        strength: The strength of the color jitter.
    """
    view = Compose(
        [
            RandomResizedCrop(size, interpolation="bicubic", antialias=True),
            RandomHorizontalFlip(),
            RandomApply([ColorJitter(0.8 * strength, 0.8 * strength, 0.8 * strength, 0.2 * strength)], p=0.8),
            RandomGrayscale(0.2),
            RandomApply([GaussianBlur(_odd(size // 10), sigma=(0.1, 2.0))], p=0.5),
        ]
    )
    return MultiCrop([view, view])


def dino(size: int = 224, small_size: int = 96, num_small: int = 8) -> MultiCrop:
    """Return a pipeline that makes the large and small crops of DINO (arxiv.org/abs/2104.14294).

    Args:
        size: The size of the large crops in pixels.
        small_size: The size of the small crops in pixels.
        num_small: The number of small crops.
    """

    def crop(side: int, scale: tuple[float, float], blur: float, solarize: float = 0.0) -> Compose:
        return Compose(
            [
                RandomResizedCrop(side, scale, interpolation="bicubic", antialias=True),
                RandomHorizontalFlip(),
                RandomApply([ColorJitter(0.4, 0.4, 0.2, 0.1)], p=0.8),
                RandomGrayscale(0.2),
                RandomApply([GaussianBlur(_odd(side // 10), sigma=(0.1, 2.0))], p=blur),
                RandomSolarize(128, p=solarize),
            ]
        )

    large = [crop(size, (0.4, 1.0), blur=1.0), crop(size, (0.4, 1.0), blur=0.1, solarize=0.2)]
    return MultiCrop([*large, *[crop(small_size, (0.05, 0.4), blur=0.5)] * num_small])


def cifar(size: int = 32) -> Compose:
    """Return the usual training pipeline for CIFAR: random crops of padded images, and flips."""
    return Compose([RandomCrop(size, padding=size // 8), RandomHorizontalFlip()])


def cifar_eval(size: int = 32) -> Compose:
    """Return CIFAR's evaluation pipeline, which crops the center of images that are larger than ``size``."""
    return Compose([CenterCrop(size)])


RECIPES: dict[str, Callable[[int], Compose | MultiCrop]] = {
    recipe.__name__: recipe
    for recipe in (imagenet_train, imagenet_eval, trivial_augment, randaugment, simclr, dino, cifar, cifar_eval)
}
"""The pipelines by their names on the command line. Each function accepts the size of its images."""


def _odd(size: int) -> int:
    return size | 1  # A kernel's size must be odd.
