"""A small training driver: ``train(model, loader, config)``, or ``TrainStep`` in your own loop.

Names are loaded on first use, so that the command line can read ``TrainConfig`` without loading
torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardio.lazy import import_on_use

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

__getattr__ = import_on_use(
    __name__,
    {
        "shardio.models": "make_model small_resnet",
        ".callbacks": "Callback Compile GradientPenalty PrintEpochs",
        ".checkpoint": "load_checkpoint save_checkpoint",
        ".config": "TrainConfig",
        ".evaluation": "evaluate",
        ".loop": "count_steps train",
        ".memory": "memory_difference",
        ".meters": "EpochResult Score StepRecord",
        ".report": "RatePlot plot_rates write_report",
        ".seeds": "seed_everything",
        ".step": "TrainStep in_groups",
    },
)


def __dir__() -> list[str]:
    return sorted(__all__)
