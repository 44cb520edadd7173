"""The number of batches that torch's DataLoader makes from a ShardDataset, which may differ from its length."""

from __future__ import annotations

import warnings
from typing import Any

from torch.utils.data import DataLoader

from shardio.datasets.split_once import find_callers
from shardio.order import Split


def warn_of_other_length(dataset: Any, split: Split) -> None:
    """Warn if torch's DataLoader requests the dataset's length but makes a different number of batches.

    torch divides the length by the batch size, but each of its workers may end with an incomplete batch. The batch size
    and the number of workers are those of the calling loader.

    Args:
        dataset: The dataset whose length is requested.
        split: The rank's share, in blocks of the dataset's ``batch_size``, or of one sample.
    """
    loader = next((one for one in find_callers() if isinstance(one, DataLoader) and one.dataset is dataset), None)
    if loader is None or loader.batch_size is None:
        return
    num_samples, size, num_workers = split.num_own_samples, loader.batch_size, max(loader.num_workers, 1)
    shares = [len(range(worker, split.num_batches, num_workers)) * split.batch_size for worker in range(num_workers)]
    shares[(split.num_batches - 1) % num_workers] -= sum(shares) - num_samples  # The last block may be incomplete.
    num_made = sum(share // size if loader.drop_last else -(-share // size) for share in shares)
    num_said = num_samples // size if loader.drop_last else -(-num_samples // size)
    if num_made != num_said:
        lost = f", and leaves out {num_samples - num_made * size} of {num_samples} samples" if loader.drop_last else ""
        warnings.warn(
            f"{type(loader).__name__} makes {num_made} batches{lost}, but its length is {num_said}: several of "
            f"its {num_workers} workers end with an incomplete batch. Use {type(dataset).__name__}"
            f"(batch_size={size}), which gives the workers whole batches, or shardio.DataLoader",
            RuntimeWarning,
            stacklevel=4,
        )
