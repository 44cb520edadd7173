"""The orders of an epoch, which map positions to samples by arithmetic, and the random words that they use.

The permuted shards, laid end to end, form the tape. The tape is cut into windows, and each window into strata of
neighboring samples. Positions visit the strata of a window in turn, in bit-reversed order, so any run of positions is
spread evenly over the window, and :class:`Split` can give each rank a part of the window. Each stratum is shuffled.
Only the table of shard sizes is in memory. Each position is computed independently, so an epoch can begin anywhere at
no cost. Streams have an order of their own: a worker shuffles its shards, and then windows of the samples that it
reads.

Both orders use random words, which are a pure function of their rng key. The generator is SplitMix64 (Steele, Lea and
Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014). Word ``i`` of rng key ``k`` is
``mix64(k + (i + 1) * GAMMA)``. Words do not depend on each other, so whole vectors are computed at once. numpy's own
generators are not used because their streams may change between releases, and an order must not change.

An alternating Feistel network (Luby and Rackoff 1988; with halves of unequal width, Schneier and Kelsey 1996) permutes
0 … 2**bits - 1, where 2**bits >= n. Cycle walking (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002)
keeps the result below n. Nothing is stored, so a window may be as long as the dataset. Packing and the split into
training and validation data also use these permutations.

When you change an order, also increment its ``STATE_VERSION``, in ``state.py`` or ``datasets/stream_dataset.py``.
Otherwise, a run could resume in a different order from the one it began with. Then run ``tools/freeze_orders.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from shardio.values import check_flag, check_integer, check_optional_integer

Words = NDArray[np.uint64]
"""Random words or rng keys, uint64."""

GAMMA = np.uint64(0x9E3779B97F4A7C15)
"""The odd number nearest to 2**64 divided by the golden ratio: the step between two counters."""

_DERIVE = np.uint64(0xD1B54A32D192ED03)
"""The constant that makes rng keys derived from an rng key differ from the words of that key's stream."""

NUM_ROUNDS = 12

MIN_BITS = np.uint64(6)
"""The width of the smallest network, in bits. Twelve rounds of narrower networks, with halves of one or two bits, give
uneven orders (chi-square over rng keys at n = 5 and 6). So a short window needs more steps of cycle walking."""


def mix64(words: Words) -> Words:
    """Scramble each word with SplitMix64's finalizer, a bijection on 64 bits."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def derive_rng_key(rng_key: Words, part: Words) -> Words:
    """Derive one rng key from each pair (rng_key, part), uint64 [n] with n >= 1. The arguments are broadcast."""
    return mix64(mix64(rng_key ^ _DERIVE) + part * GAMMA)


def make_rng_key(seed: int, *parts: int | str) -> Words:
    """Return the rng key of ``seed`` and ``parts``, uint64 [1].

    Args:
        seed: The user's seed, 0 <= seed < 2**64.
        parts: Integers below 2**64 (an epoch, a window) or names of purposes, at most 8 ASCII characters each.
    """
    rng_key = np.array([seed], dtype=np.uint64)
    for part in parts:
        number = int.from_bytes(part.encode("ascii"), "little") if isinstance(part, str) else part
        rng_key = derive_rng_key(rng_key, np.array([number], dtype=np.uint64))
    return rng_key


def random_words(rng_key: Words, counters: Words) -> Words:
    """Return the words at ``counters`` in the streams of ``rng_key``, uint64. The arguments are broadcast."""
    return mix64(rng_key + (counters + np.uint64(1)) * GAMMA)


def augment_rng_keys(seed: int, epoch: int, indices: NDArray[np.int64], repetitions: Words | None = None) -> Words:
    """Return one rng key for each sample's transforms, uint64 [n].

    Args:
        seed: The seed of the order or of the dataset.
        epoch: The epoch's number.
        indices: int64 [n], the samples' indices.
        repetitions: uint64 [n], the number of times that a sampler returned each sample earlier in the epoch; None if
            there are no repetitions.
    """
    rng_keys = derive_rng_key(make_rng_key(seed, epoch, "augment"), indices.astype(np.uint64))
    if repetitions is not None and repetitions.any():
        rng_keys = np.where(repetitions > 0, derive_rng_key(rng_keys, repetitions), rng_keys)
    return rng_keys


def to_unit(words: Words) -> NDArray[np.float64]:
    """Map the upper 53 bits of words to float64 in [0, 1)."""
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permute(index: NDArray[np.int64], size: NDArray[np.int64], rng_key: Words) -> NDArray[np.int64]:
    """Apply to each index the permutation of 0 … size-1 that belongs to ``rng_key``.

    Args:
        index: int64 [n], 0 <= index < size.
        size: int64 [n] or [1].
        rng_key: uint64 [n] or [1]. Elements with the same rng key and size share one permutation.

    Returns:
        int64 [n], 0 <= result < size.
    """
    value = index.astype(np.uint64)
    size, rng_key = np.broadcast_to(size, value.shape), np.broadcast_to(rng_key, value.shape)
    bits = np.maximum(_bit_length(size - 1), MIN_BITS)
    walking = np.arange(len(value))
    while len(walking):
        value[walking] = _network(value[walking], bits[walking], rng_key[walking])
        walking = walking[value[walking] >= size[walking].astype(np.uint64)]
    return _swap_first_two(value, size, rng_key).astype(np.int64)


def _bit_length(numbers: NDArray[np.int64]) -> Words:
    powers = np.int64(1) << np.arange(63, dtype=np.int64)
    return np.searchsorted(powers, numbers, side="right").astype(np.uint64)


def _network(value: Words, bits: Words, rng_key: Words) -> Words:
    # Each round XORs a hash of one half into the other.
    low_bits = bits >> np.uint64(1)
    low_mask = (np.uint64(1) << low_bits) - np.uint64(1)
    high_mask = (np.uint64(1) << (bits - low_bits)) - np.uint64(1)
    low: Words = value & low_mask
    high: Words = value >> low_bits
    for _ in range(NUM_ROUNDS // 2):
        rng_key = rng_key + GAMMA
        high = high ^ (mix64(low + rng_key) & high_mask)
        rng_key = rng_key + GAMMA
        low = low ^ (mix64(high + rng_key) & low_mask)
    joined: Words = (high << low_bits) | low
    return joined


def _swap_first_two(value: Words, size: NDArray[np.int64], rng_key: Words) -> Words:
    # Swap two values for half of the rng keys, because a Feistel network is always an even permutation.
    coin: Words = mix64(~rng_key) & np.uint64(1)
    swapped = (value < np.uint64(2)) & (size > 1)
    swap: Words = swapped.astype(np.uint64) & coin
    return value ^ swap


SHARDS_PER_WINDOW = 32
"""The maximum number of shards of average size whose samples a default window holds."""

MIN_WINDOW = 65_536
"""The size in samples up to which a default window grows if SHARDS_PER_WINDOW shards hold fewer samples. Each of 1,024
ranks then reads 64 samples of a window."""

SORTED_SHARDS = 120
"""The minimum number of shards of average size in a window if shards are sorted by class. A batch of 256 samples then
comes from 106 shards on average, and a rank holds one descriptor for each open shard."""

MIN_STRATUM = 32
"""The smallest default stratum, in samples. The network of a smaller stratum would need more steps of cycle walking."""

MAX_STRATA = 4096
"""The maximum default number of strata. If there are more ranks, they share strata."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderSettings:
    """The order of the samples in each epoch. The order never depends on the world size, the workers or the batch size.

    Attributes:
        shuffle: Whether the epoch is shuffled. Without shuffling, position p holds sample p.
        seed: The user's seed, 0 <= seed < 2**63.
        window: The number of neighboring samples of the tape that are shuffled together, a multiple of ``strata``.
        strata: The number of equal parts of a window, a power of two. Consecutive positions come from the parts in
            turn, and ranks read different parts. If there is only one part, all ranks read the whole window.
    """

    shuffle: bool
    seed: int
    window: int
    strata: int


def choose_settings(
    shard_sizes: NDArray[np.int64],
    *,
    shuffle: bool,
    seed: int,
    window: int | None = None,
    strata: int | None = None,
    is_sorted: bool = False,
) -> OrderSettings:
    """Check the user's settings and fill in defaults, which depend only on the shards and on ``is_sorted``.

    By default, the tape is cut into as few equal windows as possible, each of at most 32 shards of average size, or
    65,536 samples if that is more. So a small dataset is shuffled as a whole. A stratum has at least 32 samples, and a
    window at most 4,096 strata. If the shards are sorted, windows hold at least 120 shards and have one stratum, so
    that the batches of each rank come from many shards.

    Args:
        shard_sizes: int64 [shards], the number of samples in each shard.
        shuffle: Whether to shuffle. If not, window and strata must not be set.
        seed: 0 <= seed < 2**63.
        window: The window's length in samples, which is rounded up to a multiple of ``strata``; None for the default.
        strata: The number of strata, at most 65,536, or None for the default.
        is_sorted: Whether the samples of a shard have few classes.

    Raises:
        TypeError: If ``seed``, ``window`` or ``strata`` is not an integer, or ``shuffle`` is not a boolean.
        ValueError: If a setting is out of range.
    """
    shuffle = check_flag("shuffle", shuffle)
    seed = check_integer("seed", seed, at_least=0, below=2**63)
    window, strata = (
        check_optional_integer(name, value, at_least=1) for name, value in (("window", window), ("strata", strata))
    )
    for name, value in (("window", window), ("strata", strata)):
        if value is not None and not shuffle:
            raise ValueError(f"{name}={value} has no effect without shuffle=True: remove it, or set shuffle=True")
    if strata is not None and (strata & (strata - 1) or strata > 2**16):
        raise ValueError(f"strata must be a power of two, and at most 65536, got {strata}")
    if not shuffle:
        return OrderSettings(shuffle=False, seed=seed, window=1, strata=1)

    num_samples, num_shards = max(int(shard_sizes.sum()), 1), max(len(shard_sizes), 1)
    if window is None:
        num_mixed = SORTED_SHARDS if is_sorted else SHARDS_PER_WINDOW
        size = max(MIN_WINDOW, num_mixed * -(-num_samples // num_shards))
        num_windows = max(num_samples // size, 1) if is_sorted else -(-num_samples // size)
        window = -(-num_samples // num_windows)
    window = min(window, num_samples)
    if strata is None:
        strata = 1 if is_sorted else min(MAX_STRATA, 1 << max((window // MIN_STRATUM).bit_length() - 1, 0))
    return OrderSettings(shuffle=True, seed=seed, window=-(-window // strata) * strata, strata=strata)


def permute_shards(num_shards: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return an epoch's order of the shards, int64 [shards]."""
    rng_key = make_rng_key(seed, epoch, "shards")
    return np.argsort(random_words(rng_key, np.arange(num_shards, dtype=np.uint64)), kind="stable")


@cache
def reverse_bits(num_strata: int) -> NDArray[np.int64]:
    """Return the stratum that each of ``num_strata`` turns visits, and also the turn that visits each stratum, int64.

    Turns visit the strata in bit-reversed order, which is its own inverse. So 2**k consecutive turns visit one stratum
    in each of 2**k equal parts of a window (van der Corput 1935).

    Args:
        num_strata: A power of two.
    """
    turns = np.zeros(1, np.int64)
    while len(turns) < num_strata:
        turns = np.concatenate([2 * turns, 2 * turns + 1])
    turns.flags.writeable = False  # Callers share the array.
    return turns


class EpochOrder:
    """One epoch's order of the samples of a dataset.

    Args:
        shard_sizes: int64 [shards], the number of samples in each shard in manifest order.
        settings: The order's settings.
        epoch: The epoch's number, at least 0.
    """

    def __init__(self, shard_sizes: NDArray[np.int64], settings: OrderSettings, epoch: int) -> None:
        self.settings = settings
        self.epoch = epoch
        self.num_samples = int(shard_sizes.sum())
        tape = self._permuted_shards(len(shard_sizes))
        shard_starts = np.cumsum(shard_sizes) - shard_sizes
        self._tape_stops = np.cumsum(shard_sizes[tape])
        # An offset on the tape plus its shift is the sample's index in manifest order.
        self._tape_shifts = shard_starts[tape] - (self._tape_stops - shard_sizes[tape])
        # In the last window, the strata of the first turns may be one sample longer than the others.
        is_longer = reverse_bits(settings.strata) < self.num_samples % settings.window % settings.strata
        self._num_longer_before: NDArray[np.int64] = np.cumsum(is_longer) - is_longer

    def samples_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the samples at the given positions of the epoch.

        Args:
            positions: int64 [n], at least 0. Beyond the last position, the order repeats (position p mod N), as a
                remainder policy may require.

        Returns:
            int64 [n], the samples' indices in manifest order.
        """
        positions = positions % self.num_samples
        if not self.settings.shuffle:
            return positions
        offsets = self._offsets_on_tape(positions)
        return offsets + self._tape_shifts[np.searchsorted(self._tape_stops, offsets, side="right")]

    def _permuted_shards(self, num_shards: int) -> NDArray[np.int64]:
        if not self.settings.shuffle:
            return np.arange(num_shards, dtype=np.int64)
        return permute_shards(num_shards, self.settings.seed, self.epoch)

    def _offsets_on_tape(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        length, strata = self.settings.window, self.settings.strata
        window, index = np.divmod(positions, length)
        window_start = window * length
        window_size = np.minimum(length, self.num_samples - window_start)
        row, turn = np.divmod(index, strata)
        stratum = reverse_bits(strata)[turn]
        quotient, num_longer = np.divmod(window_size, strata)
        stratum_size = quotient + (turn < num_longer)
        stratum_start = stratum * quotient + np.where(num_longer > 0, self._num_longer_before[stratum], 0)

        rng_key = derive_rng_key(make_rng_key(self.settings.seed, self.epoch, "windows"), window.astype(np.uint64))
        place = stratum_start + permute(row, stratum_size, derive_rng_key(rng_key, stratum.astype(np.uint64)))
        # Rotate each window, so that a rank does not read the same part of a small dataset in every epoch.
        shift = random_words(rng_key, np.zeros(1, np.uint64)) % window_size.astype(np.uint64)
        return np.asarray(window_start + (place + shift.astype(np.int64)) % window_size, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOrder:
    """The order of the samples that one worker reads from streams.

    Attributes:
        num_shards: The number of shards of all ranks.
        seed: The seed of the order.
        shuffle: Whether shards and samples are shuffled.
        rank: The rank.
        world_size: The number of ranks.
        worker_id: The worker's number in its rank.
        num_workers: The number of workers of each rank.
    """

    num_shards: int
    seed: int
    shuffle: bool
    rank: int
    world_size: int
    worker_id: int
    num_workers: int

    def own_shards(self, epoch: int) -> NDArray[np.int64]:
        """Return the shards that the worker reads, in reading order, int64 [n].

        The shards of an epoch are assigned to the ranks in turn, and the shards of a rank to its workers in turn.
        """
        shards = np.arange(self.num_shards, dtype=np.int64)
        if self.shuffle:
            shards = permute_shards(self.num_shards, self.seed, epoch)
        return shards[self.rank :: self.world_size][self.worker_id :: self.num_workers]

    def order_window(self, epoch: int, window: int, num_samples: int) -> NDArray[np.int64]:
        """Return the order of the samples, shuffled together, in a window of the worker's epoch, int64 [n]."""
        rows = np.arange(num_samples, dtype=np.int64)
        if not self.shuffle:
            return rows
        rng_key = make_rng_key(self.seed, epoch, "stream", self.rank, self.worker_id, window)
        return permute(rows, np.array([num_samples]), rng_key)

    def rng_keys(self, epoch: int, shards: NDArray[np.int64], numbers: NDArray[np.int64]) -> Words:
        """Return one rng key for each sample's transforms, uint64 [n], regardless of ranks and workers.

        Args:
            epoch: The epoch.
            shards: int64 [n], the samples' shards.
            numbers: int64 [n], the samples' numbers in their shards.
        """
        of_shards = derive_rng_key(make_rng_key(self.seed, epoch, "streamed"), shards.astype(np.uint64))
        return derive_rng_key(of_shards, numbers.astype(np.uint64))
