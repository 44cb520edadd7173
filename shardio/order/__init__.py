"""The order of an epoch's samples and its split over ranks: integers in, integers out, with numpy alone."""

from shardio.order.bijection import permute
from shardio.order.cursor import Cursor, EpochCounter, Progress, check_epoch
from shardio.order.epoch_order import EpochOrder
from shardio.order.quality import IDEAL_DISTANCE, OrderQuality, measure_quality, shards_of
from shardio.order.settings import OrderSettings, choose_settings
from shardio.order.split import Remainder, Split
from shardio.order.state import dump_state, read_state
from shardio.order.steps import iterate_steps
from shardio.order.words import Words, augment_rng_keys, derive_rng_key, make_rng_key, random_words, to_unit

__all__ = [
    "IDEAL_DISTANCE",
    "Cursor",
    "EpochCounter",
    "EpochOrder",
    "OrderQuality",
    "OrderSettings",
    "Progress",
    "Remainder",
    "Split",
    "Words",
    "augment_rng_keys",
    "check_epoch",
    "choose_settings",
    "derive_rng_key",
    "dump_state",
    "iterate_steps",
    "make_rng_key",
    "measure_quality",
    "permute",
    "random_words",
    "read_state",
    "shards_of",
    "to_unit",
]
