"""Train a small language model on a mixture whose weights change. Kill the script at any time and rerun it.

The data consists of two kinds of text, "prose" and "numbers", whose characters are the tokens. At first, most of the
text is prose; at the end, most of it is numbers. A checkpoint holds the model, the optimizer and the state of the
loader, which counts the samples of the mixture. So a killed and resumed run has the same losses as an uninterrupted
one, to the last digit.

    python examples/annealed_mixture.py OUT [--kill-at STEP]
"""

from __future__ import annotations

import argparse
import os
import random
import signal
from pathlib import Path

import numpy as np
import torch
from torch import nn

import shardio
from shardio import MixedDataset, PackedTokens, ShardWriter

BATCH_SIZE, BLOCK, STEPS = 8, 65, 60
END_OF_TEXT = 0


def write_texts(folder: Path) -> None:
    """Pack 400 texts of each kind as arrays of tokens."""
    words = ["a", "loader", "feeds", "the", "model", "and", "never", "waits"]
    for kind in ("prose", "numbers"):
        if (folder / kind).exists():
            continue
        rng = random.Random(kind)
        with ShardWriter(folder / kind) as writer:
            for number in range(400):
                size = rng.randint(5, 40)
                text = " ".join(rng.choice(words) if kind == "prose" else str(rng.randint(0, 999)) for _ in range(size))
                writer.write({"__key__": f"{number:06d}", "npy": np.frombuffer(text.encode(), np.uint8)})


def make_loader(folder: Path) -> shardio.DataLoader[torch.Tensor]:
    """Return the loader of the mixture: 9 parts prose to 1 part numbers, then half and half, then mostly numbers."""
    prose, numbers = (
        PackedTokens(folder / kind, BLOCK, eos=END_OF_TEXT, fields="tokens") for kind in ("prose", "numbers")
    )
    mix = MixedDataset(
        {"prose": (prose, 0.9), "numbers": (numbers, 0.1)},
        stop=STEPS * BATCH_SIZE,
        global_batch_size=BATCH_SIZE,
    )
    mix.at(20, {"prose": 0.5, "numbers": 0.5}).at(40, {"prose": 0.1, "numbers": 0.9})
    return shardio.DataLoader(mix, batch_size=BATCH_SIZE, num_workers=2)


def main() -> None:
    """Train, or resume from the last checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="Directory of the data and the checkpoint.")
    parser.add_argument("--kill-at", type=int, metavar="STEP", help="Kill the process after this step.")
    arguments = parser.parse_args()

    arguments.out.mkdir(parents=True, exist_ok=True)
    write_texts(arguments.out)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Embedding(128, 32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 128))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader, step, checkpoint = make_loader(arguments.out), 0, arguments.out / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
        step = saved["step"]
        print(f"resumed after step {step}")

    for tokens in loader:
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten().long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        print(f"step {step:3}  loss {loss.item():.9f}", flush=True)
        if step % 10 == 0:
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "loader": loader.state_dict(),
                "step": step,
            }
            torch.save(state, checkpoint.with_suffix(".tmp"))
            checkpoint.with_suffix(".tmp").rename(checkpoint)  # A killed run never leaves half a checkpoint.
        if step == arguments.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
