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
from .decoded_cache import (
    DecodedCache as DecodedCache,
    count_free_memory as count_free_memory,
    make_cache as make_cache,
)
from .formats import (
    CONVERTIBLE as CONVERTIBLE,
    IMAGE_FIELDS as IMAGE_FIELDS,
    IMAGE_FORMATS as IMAGE_FORMATS,
    JPEG_FIELDS as JPEG_FIELDS,
    PIXEL_FIELDS as PIXEL_FIELDS,
    UNCOMPRESSED as UNCOMPRESSED,
    ConvertedFormat as ConvertedFormat,
    describe_other_images as describe_other_images,
    encode_png as encode_png,
    find_clipped_type as find_clipped_type,
    find_field as find_field,
    find_format as find_format,
    holds_images as holds_images,
    is_convertible as is_convertible,
    read_format as read_format,
)
from .netpbm import find_pixels as find_pixels
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
    DecodeError as DecodeError,
    Floats as Floats,
    Operations as Operations,
    RenderedImages as RenderedImages,
    define_operation as define_operation,
    edit_images as edit_images,
    make_operations as make_operations,
    normalize_floats as normalize_floats,
    normalize_image as normalize_image,
    render_chunk as render_chunk,
    render_crops as render_crops,
    why_not_by_kernel as why_not_by_kernel,
)
from .tiled import TiledChunk as TiledChunk, collect_tiles as collect_tiles
