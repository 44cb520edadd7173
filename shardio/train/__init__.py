"""A small training driver: ``train(model, loader, TrainConfig(...))``."""

from shardio.train.config import TrainConfig
from shardio.train.loop import evaluate, train
from shardio.train.meters import EpochResult
from shardio.train.resnet import small_resnet

__all__ = ["EpochResult", "TrainConfig", "evaluate", "small_resnet", "train"]
