"""Import torch's companion libraries, and create ordinary tensors regardless of the modes set in torch."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any


def import_torchvision() -> None:
    """Import torchvision, even if its compiled part does not load.

    A build of torchvision with CUDA cannot load this part if torch was built without CUDA. Only detection models need
    this part, and torchvision raises an error if it is missing. Declaring two of its operators is enough to import
    torchvision.

    Raises:
        ImportError: If torchvision is not installed.
        RuntimeError: If torchvision was built for a different version of torch.
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


def own_tensors() -> AbstractContextManager[None]:
    """Return a context in which new tensors are ordinary CPU tensors, regardless of the modes that the caller has set.

    With ``torch.set_default_device("cuda")``, the loader's seeds and batches would be on a device, where numpy and
    worker processes cannot read them. A tensor created in ``torch.inference_mode()`` cannot be changed outside of it.
    """
    import torch
    from torch.overrides import _get_current_function_mode_stack  # torch's default device is a function mode.

    has_modes = torch.is_inference_mode_enabled() or _get_current_function_mode_stack()
    return _ordinary_tensors(torch.device("cpu")) if has_modes else nullcontext()


def outside_of_inference_mode() -> AbstractContextManager[None]:
    """Return a context in which new tensors are ordinary tensors on the caller's default device."""
    import torch

    return _ordinary_tensors(nullcontext()) if torch.is_inference_mode_enabled() else nullcontext()


@contextmanager
def _ordinary_tensors(on_device: Any) -> Iterator[None]:
    import torch

    with ExitStack() as stack:
        stack.enter_context(on_device)
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(mode=False))
            stack.enter_context(torch.no_grad())  # Inference mode records no gradients either.
        yield


def import_library(name: str) -> Any:
    """Import ``torchvision`` or ``timm``.

    Raises:
        ValueError: If the library is not installed, or was built for a different version of torch.
    """
    import torch

    try:
        import_torchvision()  # timm also imports it.
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = (error.name or name).partition(".")[0]  # The package to install, without submodules.
        raise ValueError(f"{name}:… needs {missing}, which is not installed: pip install {missing}") from error
    except (ImportError, RuntimeError) as error:
        raise ValueError(
            f"{name}:… needs {name}, which cannot be imported with torch {torch.__version__} ({error}): "
            "install builds of torch and torchvision that match"
        ) from error
