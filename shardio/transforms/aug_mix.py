"""AugMix (arxiv.org/abs/1912.02781), with torchvision's arguments and distributions."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from shardio.images import Operations, Sizes, make_operations
from shardio.images.kernel.compiled import operation_records as codes
from shardio.order import Words, derive_rng_key
from shardio.transforms.augmentation_space import AUG_MIX, PARTIAL_AUG_MIX
from shardio.transforms.auto_augment import Augmentation
from shardio.transforms.drawing import draw_gammas, draw_units, to_integers
from shardio.transforms.fills import Fill
from shardio.values import check_integer

NUM_STRENGTHS = 10
MAX_DEPTH = 3
"""The largest depth of a chain whose depth is random."""


class AugMix(Augmentation):
    """Mix an image with what several random chains of operations make of it.

    The operations have the pixels of Pillow. torchvision converts Pillow images to tensors first, whose operations
    round differently. The mixture itself is computed as there. In a Compose with fields, it moves only images.

    Args:
        severity: The largest strength of an operation, from 1 to 10.
        mixture_width: The number of chains.
        chain_depth: The number of operations in a chain; 1 to 3 at random if it is not positive.
        alpha: The weights of the chains are drawn from Dirichlet(alpha, …), that of the image from Beta(alpha, alpha).
        all_ops: Whether to also change brightness, colour, contrast and sharpness.
        interpolation: "nearest", "bilinear" or "bicubic", or the constant of torchvision's or Pillow's.
        fill: The colour of pixels outside the image: one number or three; black by default.
    """

    def __init__(
        self,
        severity: int = 3,
        mixture_width: int = 3,
        chain_depth: int = -1,
        alpha: float = 1.0,
        all_ops: bool = True,
        interpolation: object = "bilinear",
        fill: Fill = None,
    ) -> None:
        super().__init__(AUG_MIX if all_ops else PARTIAL_AUG_MIX, NUM_STRENGTHS, interpolation, fill)
        self.severity = check_integer("severity", severity, at_least=1, below=NUM_STRENGTHS + 1)
        self.mixture_width = check_integer("mixture_width", mixture_width, at_least=1)
        self.chain_depth = check_integer("chain_depth", chain_depth)
        if not 0 < alpha < math.inf:
            raise ValueError(f"alpha must be positive and finite, got {alpha}")
        self.alpha, self.all_ops = float(alpha), all_ops

    def draw(self, sizes: Sizes, rng_keys: Words) -> Operations:
        """Return the operations on n images, OPERATION [n, k]."""
        num_chains, depth = self.mixture_width, self.chain_depth if self.chain_depth > 0 else MAX_DEPTH
        unit = draw_units(rng_keys, num_chains * (1 + 3 * depth)).reshape(len(sizes), num_chains, -1)
        depths = to_integers(unit[..., :1], MAX_DEPTH) + 1 if self.chain_depth <= 0 else depth
        chosen, strengths, signs = np.split(unit[..., 1:], 3, axis=2)  # [n, chain, place] each
        operations = self._make(
            to_integers(chosen, len(self._space)).reshape(len(sizes), -1),
            to_integers(strengths, self.severity).reshape(len(sizes), -1),
            np.where(signs < 0.5, -1.0, 1.0).reshape(len(sizes), -1),
            sizes,
        ).reshape(chosen.shape)
        operations["code"][np.arange(depth) >= np.broadcast_to(depths, chosen.shape)] = codes.NONE
        weights = self._draw_weights(rng_keys)
        chains = [
            np.concatenate([operations[:, i], make_operations(len(sizes), codes.ADD_TO_MIXTURE, weights[:, 1 + i])], 1)
            for i in range(num_chains)
        ]
        begin = make_operations(len(sizes), codes.BEGIN_MIXTURE, weights[:, 0])
        return np.concatenate([begin, *chains, make_operations(len(sizes), codes.END_MIXTURE)], axis=1)

    def _draw_weights(self, rng_keys: Words) -> NDArray[np.float64]:
        """Return the weights of n images and of their chains, float64 [n, 1 + mixture_width]."""
        # Normalised gamma variates have a Dirichlet distribution.
        gammas = draw_gammas(derive_rng_key(rng_keys, np.array([0], np.uint64)), self.alpha, 2 + self.mixture_width)
        own, chains = gammas[:, :2], gammas[:, 2:]
        own, chains = (each / each.sum(axis=1, keepdims=True) for each in (own, chains))
        # torchvision computes with 32 bits.
        scaled = chains.astype(np.float32) * own[:, 1:].astype(np.float32)
        return np.concatenate([own[:, :1].astype(np.float32), scaled], axis=1).astype(np.float64)

    def __repr__(self) -> str:
        return (
            f"AugMix(severity={self.severity}, mixture_width={self.mixture_width}, chain_depth={self.chain_depth}, "
            f"alpha={self.alpha}, all_ops={self.all_ops}, {self._show_pixels()})"
        )
