from .crop_plan import (
    Boxes as Boxes,
    CropPlan as CropPlan,
    PlannedCrop as PlannedCrop,
    PlanRow as PlanRow,
    Resampling as Resampling,
    Rows as Rows,
    Sizes as Sizes,
    resize as resize,
    use_one_thread as use_one_thread,
)
from .editing import (
    Floats as Floats,
    Operations as Operations,
    edit_images as edit_images,
    make_operations as make_operations,
    move_boxes as move_boxes,
    move_mask as move_mask,
    move_points as move_points,
    normalize_floats as normalize_floats,
    normalize_image as normalize_image,
)
from .formats import (
    CONVERTIBLE as CONVERTIBLE,
    IMAGE_FIELDS as IMAGE_FIELDS,
    IMAGE_FORMATS as IMAGE_FORMATS,
    UNCOMPRESSED as UNCOMPRESSED,
    ConvertedFormat as ConvertedFormat,
    describe_other_images as describe_other_images,
    encode_png as encode_png,
    find_field as find_field,
    find_format as find_format,
    holds_images as holds_images,
    is_convertible as is_convertible,
    read_format as read_format,
)
from .kernel import (
    check_kernel as check_kernel,
    find_kernel as find_kernel,
    prepare_kernel as prepare_kernel,
    why_no_kernel as why_no_kernel,
)
from .opening import (
    JpegPicture as JpegPicture,
    decode_image as decode_image,
    decode_pil as decode_pil,
    decode_unconverted as decode_unconverted,
    decode_unconverted_pil as decode_unconverted_pil,
    open_image as open_image,
)
from .pictures import (
    CLIPPED_ADVICE as CLIPPED_ADVICE,
    DECODER_DESCRIPTIONS as DECODER_DESCRIPTIONS,
    DEFAULT_MAX_PIXELS as DEFAULT_MAX_PIXELS,
    DecodedPicture as DecodedPicture,
    DecoderName as DecoderName,
    Orientation as Orientation,
    Picture as Picture,
    Pixels as Pixels,
    TooManyPixels as TooManyPixels,
    sizes_of as sizes_of,
)
from .rendering import (
    IMAGES_AT_ONCE as IMAGES_AT_ONCE,
    DecodeError as DecodeError,
    RenderedImages as RenderedImages,
    render_chunk as render_chunk,
    render_crops as render_crops,
    why_not_by_kernel as why_not_by_kernel,
)
from .value_formats import find_clipped_type as find_clipped_type
