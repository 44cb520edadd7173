"""Image transforms with torchvision's names and defaults, for uint8 [height, width, 3] arrays.

Each image's parameters are a pure function of (seed, epoch, sample). They do not depend on the process that decodes it.
"""

from shardio.transforms.annotations import (
    AnnotationError,
    BoundingBoxes,
    FieldKind,
    KeyPoints,
    Labels,
    Mask,
    Ragged,
    move_annotations,
)
from shardio.transforms.auto_augment import RandAugment, TrivialAugmentWide
from shardio.transforms.calls import Calls
from shardio.transforms.colours import (
    ColorJitter,
    RandomAdjustSharpness,
    RandomAutocontrast,
    RandomEqualize,
    RandomGrayscale,
    RandomInvert,
    RandomPosterize,
    RandomSolarize,
)
from shardio.transforms.compose import (
    Compose,
    MultiCrop,
    apply_transform,
    count_crops,
    field_kinds_of,
    is_builtin,
    others_in,
    plan_crops,
    plan_transform,
    refuse_pillow,
)
from shardio.transforms.foreign import as_pillow, call_with_sample, is_image_array
from shardio.transforms.generators import Generators
from shardio.transforms.geometry import CenterCrop, RandomHorizontalFlip, RandomResizedCrop, Resize
from shardio.transforms.pixel_transform import PixelTransform
from shardio.transforms.recognition import Decode, is_made_for_pillow, replace_leading
from shardio.transforms.rendering import render_alike
from shardio.transforms.transform import Geometry, Transform, rng_keys_from_torch

__all__ = [
    "AnnotationError",
    "BoundingBoxes",
    "Calls",
    "CenterCrop",
    "ColorJitter",
    "Compose",
    "Decode",
    "FieldKind",
    "Generators",
    "Geometry",
    "KeyPoints",
    "Labels",
    "Mask",
    "MultiCrop",
    "PixelTransform",
    "Ragged",
    "RandAugment",
    "RandomAdjustSharpness",
    "RandomAutocontrast",
    "RandomEqualize",
    "RandomGrayscale",
    "RandomHorizontalFlip",
    "RandomInvert",
    "RandomPosterize",
    "RandomResizedCrop",
    "RandomSolarize",
    "Resize",
    "Transform",
    "TrivialAugmentWide",
    "apply_transform",
    "as_pillow",
    "call_with_sample",
    "count_crops",
    "field_kinds_of",
    "is_builtin",
    "is_image_array",
    "is_made_for_pillow",
    "move_annotations",
    "others_in",
    "plan_crops",
    "plan_transform",
    "refuse_pillow",
    "render_alike",
    "replace_leading",
    "rng_keys_from_torch",
]
