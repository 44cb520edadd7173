"""JPEGs decoded by a kernel of our own: three streams at a time, and only what a crop needs.

numba compiles it, once for each machine (:mod:`building`, :mod:`background`); whether its pixels are right there is
seen at once (:mod:`checking`), and processes that decode load the machine code without numba (:mod:`loading`). The way
of an image, and where each step is written down:

====================  =========================================================================================
:mod:`heads`          the head is read
:mod:`regions`        which MCUs the crop needs, and where they lie in memory
:mod:`streams`        their restart intervals, or the scan, without stuffed bytes
:mod:`entropy`        Huffman decoding, three streams side by side: bits become coefficients
:mod:`idct`           dequantisation and inverse DCT: coefficients become samples
:mod:`upsampling`     as many chroma samples as pixels
:mod:`colour`         samples become pixels
:mod:`resizing`       the crop becomes rows of the batch
====================  =========================================================================================

:mod:`chunk` takes these steps, for a chunk of images. :mod:`records` is the memory they share, :mod:`codes` what the
entropy decoder looks up, :mod:`vectors` arithmetic on sixteen numbers at once. Pixels are those of libjpeg-turbo's
default decoder and OpenCV's INTER_LINEAR, bit for bit. Whatever is damaged or unusual is left to libjpeg-turbo: the
kernel never says that an image is bad.
"""

from shardio.images.kernel.finding import find_kernel, prepare_kernel, why_no_kernel

__all__ = ["find_kernel", "prepare_kernel", "why_no_kernel"]
