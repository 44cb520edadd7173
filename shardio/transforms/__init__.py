"""Transforms of images, with torchvision's names and defaults, on uint8 [height, width, 3] arrays.

What each image gets is a pure function of (seed, epoch, sample), so it does not depend on who decodes it.
"""

from shardio.transforms.base import (
    Compose,
    Geometry,
    Transform,
    apply_transform,
    plan_images,
    refuse_pillow,
    render_images,
    rng_keys_from_torch,
)
from shardio.transforms.geometry import CenterCrop, RandomHorizontalFlip, RandomResizedCrop, Resize

__all__ = [
    "CenterCrop",
    "Compose",
    "Geometry",
    "RandomHorizontalFlip",
    "RandomResizedCrop",
    "Resize",
    "Transform",
    "apply_transform",
    "plan_images",
    "refuse_pillow",
    "render_images",
    "rng_keys_from_torch",
]
