"""Load training data from directories and tar shards: each sample exactly once, in a reproducible order.

Public names are loaded on first use, so ``import shardio`` is fast and does not load torch.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
