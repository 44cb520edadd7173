"""The order of an epoch's samples and its split over ranks: integers in, integers out, with numpy alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardio.lazy import import_on_use

if TYPE_CHECKING:
    from shardio.order.bijection import permute
    from shardio.order.cursor import Cursor, EpochCounter, Progress, check_epoch
    from shardio.order.epoch_order import EpochOrder
    from shardio.order.quality import IDEAL_DISTANCE, OrderQuality, measure_quality, shards_of
    from shardio.order.settings import OrderSettings, choose_settings
    from shardio.order.split import Remainder, Split
    from shardio.order.state import dump_state, read_state
    from shardio.order.steps import iterate_steps
    from shardio.order.stream_order import StreamOrder
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
    "StreamOrder",
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

__getattr__ = import_on_use(
    __name__,
    {
        ".bijection": "permute",
        ".cursor": "Cursor EpochCounter Progress check_epoch",
        ".epoch_order": "EpochOrder",
        ".quality": "IDEAL_DISTANCE OrderQuality measure_quality shards_of",
        ".settings": "OrderSettings choose_settings",
        ".split": "Remainder Split",
        ".state": "dump_state read_state",
        ".steps": "iterate_steps",
        ".stream_order": "StreamOrder",
        ".words": "Words augment_rng_keys derive_rng_key make_rng_key random_words to_unit",
    },
)
