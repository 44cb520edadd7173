"""The kernel, shardio's own JPEG decoder. It decodes three streams at a time, and only what a crop needs.

numba compiles it (:mod:`entry`, :mod:`compiling`) when shardio is built, for several processors (:mod:`targets`), or
else on the user's machine. There its pixels are checked once (:mod:`checking`), in the background. Processes that
decode load the machine code without numba (:mod:`loading`, :mod:`finding`). An image goes through these steps:

====================  =========================================================================================
:mod:`heads`          read the head
:mod:`regions`        determine the MCUs that the crop needs, and lay them out in memory
:mod:`streams`        copy their restart intervals, or the scan, without stuffed bytes
:mod:`entropy`        decode three streams side by side: bits become coefficients
:mod:`idct`           dequantise and transform: coefficients become samples
:mod:`upsampling`     interpolate chroma: one sample for each pixel
:mod:`colour`         convert colours: samples become pixels
:mod:`resizing`       resize: the crop becomes rows of the batch
====================  =========================================================================================

:mod:`chunk` takes these steps for a chunk of images. :mod:`records` defines the memory that they share, :mod:`codes`
the tables of the entropy decoder, and :mod:`vectors` arithmetic on sixteen numbers at once. Pixels are those of
libjpeg-turbo's default decoder and OpenCV's INTER_LINEAR, bit for bit. Damaged and unusual images are left to
libjpeg-turbo: the kernel never rejects an image.
"""

from shardio.images.kernel.finding import (
    check_kernel,
    compiled_functions,
    find_kernel,
    prepare_kernel,
    why_no_kernel,
)

__all__ = ["check_kernel", "compiled_functions", "find_kernel", "prepare_kernel", "why_no_kernel"]
