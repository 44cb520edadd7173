"""Turn the hue of pixels, with the results of Pillow's conversions to HSV and back (Convert.c).

Pillow computes partly with numbers of 64 bits. These formulas have 32 bits and give the same results for all 2^24
colours and all 256 shifts, as ``python -m tools.transform_campaign hues`` shows.
"""

from __future__ import annotations

import numpy as np

from shardio.images.kernel.compiled.memory import kernel_function
from shardio.images.kernel.compiled.scalars import choose, truncate

_F, _I = np.float32, np.int32


@kernel_function
def turn_hue(reds, greens, blues, count, shift):
    """Add a number, int32, to the hue of pixels, in 1/256 of the circle as Pillow has it."""
    for i in range(count):
        red, green, blue = _I(reds[i]), _I(greens[i]), _I(blues[i])
        high, low = max(red, max(green, blue)), min(red, min(green, blue))
        span = _I(high - low)
        middle = _I(_I(_I(_I(red + green) + blue) - high) - low)
        # To HSV. Hue and saturation are bytes, and the value is the highest colour.
        part = _F(_I(high - middle)) / _F(max(span, _I(1)))
        is_red, is_green = red == high, green == high
        grows = choose(is_red, green < blue, choose(is_green, blue < red, red <= green))
        start = choose(
            is_red,
            choose(grows, _F(-1), _F(1)),
            choose(is_green, choose(grows, _F(1), _F(3)), choose(grows, _F(3), _F(5))),
        )
        turn = (start + choose(grows, part, -part)) / _F(6)
        turn = choose(turn < _F(0), turn + _F(1), turn)
        hue = choose(span == _I(0), _I(0), truncate(turn * _F(255)))
        saturation = truncate(_F(span) / _F(max(high, _I(1))) * _F(255))
        hue = _I(_I(hue + shift) & _I(255))
        # And back: the colours are the highest, the lowest, and one between them.
        six = _I(hue * _I(6))
        sector = _I(_I(_I(six * _I(257)) + _I(257)) >> _I(16))
        rest = _I(six - _I(sector * _I(255)))
        weight = choose(_I(sector & _I(1)) == _I(1), rest, _I(_I(255) - rest))
        low = _I(_I(high * _I(_I(255) - saturation)) + _I(128))
        low = _I(_I(low + _I(low >> _I(8))) >> _I(8))
        between = truncate(_F(_I(high * _I(_I(65025) - _I(saturation * weight)))) * _F(1 / 65025) + _F(0.5))
        sector = choose(sector == _I(6), _I(0), sector)
        reds[i] = np.uint8(_pick(sector, _I(0), _I(5), _I(1), _I(4), high, between, low))
        greens[i] = np.uint8(_pick(sector, _I(1), _I(2), _I(0), _I(3), high, between, low))
        blues[i] = np.uint8(_pick(sector, _I(3), _I(4), _I(2), _I(5), high, between, low))


@kernel_function
def _pick(sector, high_1, high_2, between_1, between_2, high, between, low):
    is_high, is_between = (sector == high_1) | (sector == high_2), (sector == between_1) | (sector == between_2)
    return choose(is_high, high, choose(is_between, between, low))
