"""Stability: whether a sample's content is the same on every read.

Only stable content identifies samples. Three kinds of evidence show that contents change:
transforms whose class names suggest randomness, samples of the dataset that differ when they are
read again, and epochs that together hold more contents than samples.
"""

from __future__ import annotations

import copy
import random
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from shardio.check.claims import (
    HasWorkers,
    RankEpoch,
    collate_of,
    collates_columns,
    indices_of,
    is_batching,
    is_map_style,
)
from shardio.check.coverage import Coverage
from shardio.check.identity import ASK_FOR_KEY, content_ids
from shardio.errors import IdentityError

NUM_PROBES, NUM_READS = 8, 4
"""The number of samples to probe, and of reads per sample.

A flip with probability 1/2 is missed once in 2**24 runs.
"""

_RANDOM = re.compile("Random|Jitter|Augment|AugMix|MixUp|Mixup|CutMix|Erasing")
_NESTED = (
    "transform",
    "transforms",
    "joint_transform",
    "target_transform",
    "decoder",
    "dataset",
    "datasets",
    "collate_fn",
    "untagged",
)


def probe_contents(loader: Iterable[Any], epoch: RankEpoch) -> RankEpoch:
    """Read some samples several times, and return ``epoch`` with the findings.

    Raises:
        IdentityError: If the loader's batches cannot be split into samples.
    """
    if (name := _find_random(loader, depth=0)) is not None:
        return replace(epoch, instability=f"the loader has a random transform ({name})")
    if not isinstance(loader, HasWorkers):
        return epoch
    if not is_batching(loader):
        raise IdentityError(
            f"the loader does not collate (batch_size=None), so a batch may hold any number of samples. {ASK_FOR_KEY}"
        )
    indices = indices_of(loader) if is_map_style(loader) else None
    if not indices:
        return epoch
    chosen = sorted({indices[int(i)] for i in np.linspace(0, len(indices) - 1, NUM_PROBES)})
    dataset, collate, is_collated = _copied(loader.dataset), collate_of(loader), collates_columns(loader)
    with _generators_kept():
        for index in chosen:
            reads = [content_ids(collate([dataset[index]]), is_collated=is_collated) for _ in range(NUM_READS)]
            if any(len(ids) != 1 for ids in reads):
                raise IdentityError(
                    f"collate_fn makes {len(reads[0])} rows from one sample, so samples cannot be identified by their "
                    f"content. {ASK_FOR_KEY}"
                )
            if len({int(ids[0]) for ids in reads}) > 1:
                return replace(epoch, instability=f"sample {index} differs when it is read again")
    # User code may behave differently in workers, which only another epoch can show.
    has_workers = loader.num_workers > 0 and getattr(loader, "calls_dataset", True)
    return replace(epoch, is_stable=None if has_workers else True)


def contents_change(epochs: Sequence[Coverage], num_samples: int | None) -> bool | None:
    """Return whether epochs hold more contents than samples; None for fewer than two epochs.

    Args:
        epochs: The epochs of one loader, over all ranks.
        num_samples: The number of samples. If None, later epochs must not hold contents that the
            first one lacks.
    """
    contents = [np.unique(epoch.arrays()[0]) for epoch in epochs if epoch.num_deliveries]
    if len(contents) < 2:
        return None
    return len(np.unique(np.concatenate(contents))) > (len(contents[0]) if num_samples is None else num_samples)


def _find_random(holder: Any, depth: int) -> str | None:
    """Return the name of a random transform that a loader, a dataset or a transform holds."""
    if depth and _RANDOM.search(type(holder).__name__) and callable(holder):
        return type(holder).__name__
    if depth > 6:
        return None
    held = holder if isinstance(holder, list | tuple) else [getattr(holder, name, None) for name in _NESTED]
    found = (_find_random(one, depth + 1) for one in held[:100] if one is not None)
    return next(filter(None, found), None)


def _copied(dataset: Any) -> Any:
    """Return a shallow copy of a dataset and of the datasets in it.

    Reading the copy opens no files in the original, which workers forked later would share.
    """
    copied = copy.copy(dataset)
    for name in ("dataset", "datasets"):
        inner = getattr(copied, "__dict__", {}).get(name)
        if inner is not None:
            setattr(copied, name, [_copied(one) for one in inner] if isinstance(inner, list) else _copied(inner))
    return copied


@contextmanager
def _generators_kept() -> Iterator[None]:
    """Restore the global random generators after the block, to undo the effect of probing."""
    torch = sys.modules.get("torch")
    states = random.getstate(), np.random.get_state(), None if torch is None else torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        if torch is not None:
            torch.set_rng_state(states[2])
