"""The doctor, which finds out whether a loader holds training back, which stage is responsible, and what to change."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
