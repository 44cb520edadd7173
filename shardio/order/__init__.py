"""The order of an epoch's samples and its split over ranks: integers in, integers out, using only numpy."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
