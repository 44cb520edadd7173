"""A small training driver: ``train(model, loader, config)``, or ``TrainStep`` in your own loop.

Names are loaded on first use, so that the command line can read ``TrainConfig`` without loading
torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardio.models import make_model, small_resnet
    from shardio.train.callbacks import Callback, Compile, GradientPenalty, PrintEpochs
    from shardio.train.checkpoint import load_checkpoint, save_checkpoint
    from shardio.train.config import TrainConfig
    from shardio.train.evaluation import evaluate
    from shardio.train.loop import count_steps, train
    from shardio.train.memory import memory_difference
    from shardio.train.meters import EpochResult, Score, StepRecord
    from shardio.train.report import RatePlot, plot_rates, write_report
    from shardio.train.seeds import seed_everything
    from shardio.train.step import TrainStep, in_groups

_HOMES = {
    "Callback": ".callbacks",
    "Compile": ".callbacks",
    "EpochResult": ".meters",
    "GradientPenalty": ".callbacks",
    "PrintEpochs": ".callbacks",
    "RatePlot": ".report",
    "Score": ".meters",
    "StepRecord": ".meters",
    "TrainConfig": ".config",
    "TrainStep": ".step",
    "count_steps": ".loop",
    "evaluate": ".evaluation",
    "in_groups": ".step",
    "load_checkpoint": ".checkpoint",
    "make_model": "shardio.models",
    "memory_difference": ".memory",
    "plot_rates": ".report",
    "save_checkpoint": ".checkpoint",
    "seed_everything": ".seeds",
    "small_resnet": "shardio.models",
    "train": ".loop",
    "write_report": ".report",
}

__all__ = [
    "Callback",
    "Compile",
    "EpochResult",
    "GradientPenalty",
    "PrintEpochs",
    "RatePlot",
    "Score",
    "StepRecord",
    "TrainConfig",
    "TrainStep",
    "count_steps",
    "evaluate",
    "in_groups",
    "load_checkpoint",
    "make_model",
    "memory_difference",
    "plot_rates",
    "save_checkpoint",
    "seed_everything",
    "small_resnet",
    "train",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
