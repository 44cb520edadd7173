"""Transform images, uint8 [height, width, 3] arrays. Names and defaults are as in torchvision.

Each image's parameters are a pure function of (seed, epoch, sample), whichever process decodes the image.
"""

from shardio.transforms import annotations, automatic, compose, geometry, pixels, recipes, recognition, transform, warps
from shardio.transforms.annotations import *
from shardio.transforms.automatic import *
from shardio.transforms.compose import *
from shardio.transforms.geometry import *
from shardio.transforms.pixels import *
from shardio.transforms.recognition import *
from shardio.transforms.transform import *
from shardio.transforms.warps import *

__all__ = ["recipes"]
__all__ += annotations.__all__
__all__ += automatic.__all__
__all__ += compose.__all__
__all__ += geometry.__all__
__all__ += pixels.__all__
__all__ += recognition.__all__
__all__ += transform.__all__
__all__ += warps.__all__
