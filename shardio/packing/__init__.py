"""Pack a directory of images, another tool's dataset or a program's samples into tar shards."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
