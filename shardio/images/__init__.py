"""Decode images: only the parts that a crop needs, with exactly the pixels of a full decode."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardio.lazy import import_on_use

if TYPE_CHECKING:
    from shardio.images.by_kernel import why_not_by_kernel
    from shardio.images.by_libjpeg import JpegPicture
    from shardio.images.chunk import IMAGES_AT_ONCE, DecodeError, RenderedImages, render_chunk, render_crops
    from shardio.images.crop_plan import Boxes, CropPlan, PlannedCrop, PlanRow, Rows, Sizes
    from shardio.images.decode import decode_image, decode_pil
    from shardio.images.editing import Operations, edit_images, make_operations
    from shardio.images.errors_of_pillow import ignore_pillows_warnings
    from shardio.images.formats import (
        CONVERTIBLE,
        IMAGE_FIELDS,
        IMAGE_FORMATS,
        UNCOMPRESSED,
        ConvertedFormat,
        describe_other_images,
        find_field,
        find_format,
        holds_images,
        is_convertible,
        read_format,
    )
    from shardio.images.kernel import check_kernel, find_kernel, prepare_kernel, why_no_kernel
    from shardio.images.moving import move_boxes, move_mask, move_points
    from shardio.images.normalizing import Floats, normalize_floats, normalize_image
    from shardio.images.opening import open_image
    from shardio.images.orientation import Orientation
    from shardio.images.pictures import (
        CLIPPED_ADVICE,
        DECODER_DESCRIPTIONS,
        DEFAULT_MAX_PIXELS,
        DecodedPicture,
        DecoderName,
        Picture,
        TooManyPixels,
        sizes_of,
    )
    from shardio.images.pixels import Pixels
    from shardio.images.png import encode_png
    from shardio.images.resizing import Resampling, resize, use_one_thread
    from shardio.images.unconverted import decode_unconverted, decode_unconverted_pil
    from shardio.images.value_formats import find_clipped_type

__all__ = [
    "CLIPPED_ADVICE",
    "CONVERTIBLE",
    "DECODER_DESCRIPTIONS",
    "DEFAULT_MAX_PIXELS",
    "IMAGES_AT_ONCE",
    "IMAGE_FIELDS",
    "IMAGE_FORMATS",
    "UNCOMPRESSED",
    "Boxes",
    "ConvertedFormat",
    "CropPlan",
    "DecodeError",
    "DecodedPicture",
    "DecoderName",
    "Floats",
    "JpegPicture",
    "Operations",
    "Orientation",
    "Picture",
    "Pixels",
    "PlanRow",
    "PlannedCrop",
    "RenderedImages",
    "Resampling",
    "Rows",
    "Sizes",
    "TooManyPixels",
    "check_kernel",
    "decode_image",
    "decode_pil",
    "decode_unconverted",
    "decode_unconverted_pil",
    "describe_other_images",
    "edit_images",
    "encode_png",
    "find_clipped_type",
    "find_field",
    "find_format",
    "find_kernel",
    "holds_images",
    "ignore_pillows_warnings",
    "is_convertible",
    "make_operations",
    "move_boxes",
    "move_mask",
    "move_points",
    "normalize_floats",
    "normalize_image",
    "open_image",
    "prepare_kernel",
    "read_format",
    "render_chunk",
    "render_crops",
    "resize",
    "sizes_of",
    "use_one_thread",
    "why_no_kernel",
    "why_not_by_kernel",
]

__getattr__ = import_on_use(
    __name__,
    {
        ".by_kernel": "why_not_by_kernel",
        ".by_libjpeg": "JpegPicture",
        ".chunk": "IMAGES_AT_ONCE DecodeError RenderedImages render_chunk render_crops",
        ".crop_plan": "Boxes CropPlan PlannedCrop PlanRow Rows Sizes",
        ".decode": "decode_image decode_pil",
        ".editing": "Operations edit_images make_operations",
        ".errors_of_pillow": "ignore_pillows_warnings",
        ".formats": "CONVERTIBLE IMAGE_FIELDS IMAGE_FORMATS UNCOMPRESSED ConvertedFormat describe_other_images "
        "find_field find_format holds_images is_convertible read_format",
        ".kernel": "check_kernel find_kernel prepare_kernel why_no_kernel",
        ".moving": "move_boxes move_mask move_points",
        ".normalizing": "Floats normalize_floats normalize_image",
        ".opening": "open_image",
        ".orientation": "Orientation",
        ".pictures": "CLIPPED_ADVICE DECODER_DESCRIPTIONS DEFAULT_MAX_PIXELS DecodedPicture DecoderName Picture "
        "TooManyPixels sizes_of",
        ".pixels": "Pixels",
        ".png": "encode_png",
        ".resizing": "Resampling resize use_one_thread",
        ".unconverted": "decode_unconverted decode_unconverted_pil",
        ".value_formats": "find_clipped_type",
    },
)
