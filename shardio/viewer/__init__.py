"""Show what a dataset contains: counts, histograms, thumbnails and duplicates."""

import lazy_loader

DEFAULT_THRESHOLD = 4
"""The default threshold for near duplicates, in bits. This threshold misses at most 2 % of 285 photographs after
resizing or recompression, and 8 % after 1 % is cropped from each side. The hashes of different photographs differ in
at least 14 bits.
"""

MAX_THRESHOLD = 16
"""The maximum threshold. The hashes of different pictures differ in 32 bits on average."""

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
