"""Learn a checkerboard from coordinates, in fp32 and with AMP. The results agree, and AMP is faster on a GPU.

    python examples/checkerboard.py               # with train()
    python examples/checkerboard.py --own-loop    # with TrainStep, in a custom loop

A small network receives coordinates (x, y) and predicts the color of the square. ``train`` accepts any loader of
(inputs, labels); this example uses torch's DataLoader. AMP needs only ``precision=``: bf16 on a CPU, fp16 with a
GradScaler on CUDA. AMP speeds up large matrix products on GPUs, but on only a few CPUs, so the network is wide only on
GPUs.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from shardio import DevicePrefetcher
from shardio.train import TrainConfig, TrainStep, evaluate, in_groups, seed_everything, train

NUM_SQUARES = 8  # The number of squares along each side of the board, which is [0, 1] x [0, 1].
NUM_POINTS, BATCH_SIZE = 2**15, 2**10
TOLERANCE = 0.02  # The maximum allowed differences in accuracy and in loss between the precisions.


class Network(nn.Module):
    """A network that maps coordinates, float32 [N, 2], to outputs [N, 2] via Fourier features (Tancik et al., 2020)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2)
        )

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        # Autocast keeps these angles in fp32, because half precision cannot distinguish neighboring points.
        angles = torch.cat([points * math.pi * 2**octave for octave in range(4)], dim=1)
        outputs: torch.Tensor = self.layers(torch.cat([angles.sin(), angles.cos()], dim=1))
        return outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of training: accuracy and loss on held-out points, and the time of an epoch in seconds."""

    accuracy: float
    loss: float
    epoch_s: float


def make_loader(num_points: int, seed: int) -> DataLoader[tuple[torch.Tensor, ...]]:
    """Return a loader of random points on the board and the colors of their squares."""
    points = torch.rand(num_points, 2, generator=torch.Generator().manual_seed(seed))
    colors = (points * NUM_SQUARES).long().sum(dim=1) % 2
    dataset = TensorDataset(points, colors)
    # Index a batch at a time, because collating such small samples one by one is slow.
    sampler = BatchSampler(RandomSampler(dataset), BATCH_SIZE, drop_last=False)
    return DataLoader(dataset, sampler=sampler, batch_size=None)


def run_train(model: nn.Module, config: TrainConfig, seed: int) -> Outcome:
    """Train with shardio's loop."""
    results = train(
        model, make_loader(NUM_POINTS, 2 * seed), config, val_loader=make_loader(NUM_POINTS // 8, 2 * seed + 1)
    )
    last = results[-1]
    assert last.val_accuracy is not None
    assert last.val_loss is not None
    epoch_s = statistics.median(result.train_s for result in results)
    return Outcome(accuracy=last.val_accuracy, loss=last.val_loss, epoch_s=epoch_s)


def run_own_loop(model: nn.Module, config: TrainConfig, seed: int) -> Outcome:
    """Train in a custom loop with two batches per step; the last step of an epoch may have only one batch."""
    batches = DevicePrefetcher(make_loader(NUM_POINTS, 2 * seed))
    model.to(batches.device)
    optimizer = torch.optim.AdamW(model.parameters())
    num_steps = config.epochs * math.ceil(len(batches) / 2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, config.lr, total_steps=num_steps)
    step = TrainStep(model, optimizer, schedule=schedule, precision=config.precision, accumulate=2, clip_norm=1.0)
    times = []
    for _ in range(config.epochs):
        start = time.perf_counter()
        for (points, colors), ends_step in in_groups(batches, step.accumulate):
            _, loss = step(points, colors, ends_step=ends_step)
        loss.item()  # Waits for the device.
        times.append(time.perf_counter() - start)
    score = evaluate(model, make_loader(NUM_POINTS // 8, 2 * seed + 1), config)
    return Outcome(accuracy=score.accuracy, loss=score.loss, epoch_s=statistics.median(times))


def main() -> None:
    """Train twice and compare the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--own-loop", action="store_true", help="use TrainStep in a custom loop")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--width", type=int, help="units per hidden layer (default: 64, or 4096 on a GPU)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    has_gpu = torch.cuda.is_available()
    width = options.width or (4096 if has_gpu else 64)
    outcomes = {}
    print(f"{'precision':<10} {'accuracy':>8} {'loss':>8} {'s/epoch':>8}")
    for precision in ("fp32", "fp16" if has_gpu else "bf16"):
        seed_everything(options.seed)  # Both runs start from the same weights.
        model = Network(width)
        config = TrainConfig(epochs=options.epochs, lr=5e-3, precision=precision, seed=options.seed)
        outcome = (run_own_loop if options.own_loop else run_train)(model, config, options.seed)
        print(f"{precision:<10} {outcome.accuracy:>8.1%} {outcome.loss:>8.4f} {outcome.epoch_s:>8.3f}")
        outcomes[precision] = outcome

    plain, amp = outcomes.values()
    if has_gpu:
        print(f"AMP is {plain.epoch_s / amp.epoch_s:.2f} times as fast as fp32")
    differences = abs(plain.accuracy - amp.accuracy), abs(plain.loss - amp.loss)
    agree = max(differences) <= TOLERANCE
    print(
        f"the results {'agree' if agree else 'DO NOT agree'}: accuracies differ by {differences[0]:.1%}, "
        f"losses by {differences[1]:.4f}"
    )
    sys.exit(0 if agree else 1)


if __name__ == "__main__":
    main()
