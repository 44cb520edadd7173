"""Other libraries that need help to be imported."""

from __future__ import annotations

import importlib


def import_torchvision() -> None:
    """Import torchvision, even if its compiled part does not load.

    A build of torchvision with CUDA cannot load that part with a torch without CUDA. Only
    detection models need it, and torchvision reports when it is missing. Importing torchvision
    only requires that two of its operators are declared.

    Raises:
        ImportError: If it is not installed.
        RuntimeError: If it was built for another torch.
    """
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        import torch

        for operator in ("nms", "qnms"):
            torch.library.define(
                f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )
        importlib.import_module("torchvision")
