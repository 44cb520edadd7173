"""A small training driver: ``train(model, loader, config)``, or ``TrainStep`` in your own loop.

Names are loaded on first use, so the command line can read ``TrainConfig`` without loading torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
