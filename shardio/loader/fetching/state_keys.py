"""The keys of a loader's state without shardio's order: those of torchdata's StatefulDataLoader, and a few more.

With the same keys, programs that look into the state find what they look for, and this loader can resume from states
that StatefulDataLoader saved, unless they contain the state of torchdata's own samplers.
"""

from __future__ import annotations

SNAPSHOT = "_snapshot"
SNAPSHOT_STEP = "_snapshot_step"
STEPS_SINCE_SNAPSHOT = "_steps_since_snapshot"
LAST_YIELDED_WORKER_ID = "_last_yielded_worker_id"
MAIN_SNAPSHOT = "_main_snapshot"
WORKER_SNAPSHOTS = "_worker_snapshots"
ITERATOR_FINISHED = "_iterator_finished"
NUM_WORKERS = "_num_workers"
NUM_YIELDED = "_num_yielded"
INDEX_SAMPLER_STATE = "_index_sampler_state"
SAMPLER_ITER_STATE = "_sampler_iter_state"
SAMPLER_ITER_YIELDED = "_sampler_iter_yielded"
LEN_CALLED = "_IterableDataset_len_called"
SHARED_SEED = "_shared_seed"
BASE_SEED = "_base_seed"
WORKER_ID = "worker_id"
FETCHER_STATE = "fetcher_state"
DATASET_ITER_STATE = "dataset_iter_state"
FETCHER_ENDED = "fetcher_ended"
DATASET_STATE = "dataset_state"

GENERATORS = "_generators"
"""The generators of random numbers from which the sampler draws, as they were when the epoch began."""

DRAWS_SEED = "_draws_seed"
"""Whether the seed of the workers was drawn when the epoch began, not earlier."""

DELIVERED_AHEAD = "_delivered_ahead"
"""With ``in_order=False``: the numbers of batches that were delivered although an earlier one was not."""

SAMPLER_EPOCH = "_sampler_epoch"
"""The epoch that was set on a sampler such as torch's DistributedSampler."""

NUM_SAMPLES = "_num_samples"
"""How many samples of the epoch were delivered, for the random numbers of shardio's transforms."""

SAMPLER_SAMPLES_YIELDED = "_sampler_samples_yielded"
"""How many samples torch's BatchSampler has yielded: a resumed run may have batches of another size."""

BATCH_SIZE = "_batch_size"
"""The size of the batches; 0 if a sampler determines it."""

NUM_EPOCHS_OF_SEED = "_num_epochs_of_seed"
"""How many epochs the workers' seed served before this one."""

NUM_SINCE_STATE = "num_batches_since_state"
"""How many batches of a worker were delivered since its state was reported."""
