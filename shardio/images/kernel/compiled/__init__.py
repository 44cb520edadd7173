"""The functions that are compiled, and the records that they work with.

All files but `records` import numba, so only compiling imports them.

The decoder decodes three streams at a time, and only what a crop needs. An image goes through these steps:

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

:mod:`chunk` takes these steps for a chunk of images. :mod:`codes` makes the tables of the entropy decoder. Pixels are
those of libjpeg-turbo's default decoder and OpenCV's INTER_LINEAR, bit for bit. Damaged and unusual images are left to
libjpeg-turbo: the kernel never rejects an image.

:mod:`scan_reading`, :mod:`best_table` and :mod:`scan_writing` are the inner loops of tiling. :mod:`entry` makes C
functions of them all, which :mod:`shardio.images.kernel.functions` calls. All share :mod:`records`, which defines
memory for numpy, too; arithmetic on sixteen numbers at once (:mod:`vectors`); and access to memory (:mod:`memory`).
"""
