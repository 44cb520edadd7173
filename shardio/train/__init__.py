"""A small training driver: ``train(model, loader, TrainConfig(...))``, or ``TrainStep`` in a loop of your own."""

from shardio.train.callbacks import Callback, Compile, GradientPenalty, PrintEpochs
from shardio.train.checkpoint import load_checkpoint, save_checkpoint
from shardio.train.config import TrainConfig
from shardio.train.loop import count_steps, evaluate, train
from shardio.train.memory import memory_difference
from shardio.train.meters import EpochResult, Score, StepRecord
from shardio.train.models import make_model
from shardio.train.report import RatePlot, plot_rates, write_report
from shardio.train.resnet import small_resnet
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
