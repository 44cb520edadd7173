"""Packing: turn a directory of images, or the samples of a program, into tar shards."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
