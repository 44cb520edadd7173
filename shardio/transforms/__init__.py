"""Image transforms with torchvision's names and defaults, for uint8 [height, width, 3] arrays.

Each image's parameters are a pure function of (seed, epoch, sample). They do not depend on the process that decodes it.
"""

from shardio.transforms import recipes
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
from shardio.transforms.aug_mix import AugMix
from shardio.transforms.auto_augment import AutoAugment, RandAugment, TrivialAugmentWide
from shardio.transforms.blurring import GaussianBlur
from shardio.transforms.calls import Calls
from shardio.transforms.choices import RandomApply, RandomChoice, RandomOrder
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
from shardio.transforms.compose import Combination, Compose, MultiCrop
from shardio.transforms.conversion import Normalize, ToDtype
from shardio.transforms.cropping import CornerCrop, FiveCrop, Pad, RandomCrop
from shardio.transforms.erasing import RandomErasing
from shardio.transforms.foreign import as_pillow, call_with_sample, is_image_array
from shardio.transforms.generators import Generators
from shardio.transforms.geometry import (
    CenterCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Resize,
)
from shardio.transforms.pixel_transform import PixelTransform
from shardio.transforms.planning import (
    apply_transform,
    count_crops,
    field_kinds_of,
    is_builtin,
    others_in,
    plan_crops,
    plan_transform,
    refuse_pillow,
)
from shardio.transforms.recognition import Decode, is_made_for_pillow, replace_leading
from shardio.transforms.rendering import render_alike
from shardio.transforms.transform import Geometry, Transform, rng_keys_from_torch
from shardio.transforms.warps import RandomAffine, RandomPerspective, RandomRotation

__all__ = [
    "AnnotationError",
    "AugMix",
    "AutoAugment",
    "BoundingBoxes",
    "Calls",
    "CenterCrop",
    "ColorJitter",
    "Combination",
    "Compose",
    "CornerCrop",
    "Decode",
    "FieldKind",
    "FiveCrop",
    "GaussianBlur",
    "Generators",
    "Geometry",
    "KeyPoints",
    "Labels",
    "Mask",
    "MultiCrop",
    "Normalize",
    "Pad",
    "PixelTransform",
    "Ragged",
    "RandAugment",
    "RandomAdjustSharpness",
    "RandomAffine",
    "RandomApply",
    "RandomAutocontrast",
    "RandomChoice",
    "RandomCrop",
    "RandomEqualize",
    "RandomErasing",
    "RandomGrayscale",
    "RandomHorizontalFlip",
    "RandomInvert",
    "RandomOrder",
    "RandomPerspective",
    "RandomPosterize",
    "RandomResizedCrop",
    "RandomRotation",
    "RandomSolarize",
    "RandomVerticalFlip",
    "Resize",
    "ToDtype",
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
    "recipes",
    "refuse_pillow",
    "render_alike",
    "replace_leading",
    "rng_keys_from_torch",
]
