"""The type of a decoded image."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]
"""uint8 [height, width, 3], RGB."""
