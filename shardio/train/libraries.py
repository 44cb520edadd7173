"""Libraries of models, which need not be installed."""

from __future__ import annotations

import importlib
from typing import Any

import torch

COMPILED_OPERATORS = ("nms", "qnms")
"""Those of torchvision's operators that its import asks torch for, whether its compiled part is loaded or not."""


def import_library(name: str) -> Any:
    """Import ``torchvision`` or ``timm``.

    Raises:
        ValueError: If it is not installed, or not a build for the torch that is.
    """
    try:
        _import_torchvision()  # timm imports it, too.
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"--model {name}:… needs {name}, which is not installed ({error}): pip install {name}"
        ) from error
    except (ImportError, RuntimeError) as error:
        raise ValueError(
            f"--model {name}:… needs {name}, which cannot be imported beside torch {torch.__version__} ({error}): "
            "install builds of torch and torchvision that belong together"
        ) from error


def _import_torchvision() -> None:
    """Import torchvision, even where its compiled part does not load.

    That is so for a build with CUDA beside a torch without it. Detection alone needs that part, and torchvision says so
    where it is missing. But its import asks torch for two operators of that part: declared, they are all that it needs.
    """
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for operator in COMPILED_OPERATORS:
            torch.library.define(
                f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )
        importlib.import_module("torchvision")
