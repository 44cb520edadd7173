"""A small training driver: ``train(model, loader, TrainConfig(...))``, or ``TrainStep`` in a loop of your own."""

from shardio.train.callbacks import Callback, Compile, GradientPenalty
from shardio.train.checkpoint import load_checkpoint, save_checkpoint
from shardio.train.config import TrainConfig
from shardio.train.loop import evaluate, train
from shardio.train.memory import memory_difference
from shardio.train.meters import EpochResult, StepRecord
from shardio.train.models import make_model
from shardio.train.resnet import small_resnet
from shardio.train.seeds import seed_everything
from shardio.train.step import TrainStep, in_groups

__all__ = [
    "Callback",
    "Compile",
    "EpochResult",
    "GradientPenalty",
    "StepRecord",
    "TrainConfig",
    "TrainStep",
    "evaluate",
    "in_groups",
    "load_checkpoint",
    "make_model",
    "memory_difference",
    "save_checkpoint",
    "seed_everything",
    "small_resnet",
    "train",
]
