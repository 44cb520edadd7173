"""The state that a training run saves: a cursor, its dataset and its order, as a small JSON-serializable dict."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from shardio.epochs import MAX_EPOCH
from shardio.errors import StateError
from shardio.order.cursor import Cursor
from shardio.order.settings import OrderSettings
from shardio.values import check_integer

STATE_VERSION = 1
"""The version of the order, and of the state's format. A state resumes only in the order in which it was saved."""


def dump_state(cursor: Cursor, settings: OrderSettings, digest: str, num_samples: int) -> dict[str, Any]:
    """Return the state of a run that has reached ``cursor``.

    Args:
        cursor: The cursor.
        settings: The order's settings.
        digest: The dataset's digest.
        num_samples: The dataset's number of samples.
    """
    return {
        "version": STATE_VERSION,
        "epoch": cursor.epoch,
        "position": cursor.position,
        "dataset": {"digest": digest, "samples": num_samples},
        "order": asdict(settings),
    }


def read_state(state: dict[str, Any], settings: OrderSettings, digest: str, num_samples: int) -> Cursor:
    """Check that a state belongs to this dataset and order, and return its cursor.

    Raises:
        StateError: If it does not; the message names the differences.
    """
    if not isinstance(state, dict):
        raise StateError(f"a state must be a dict from state_dict(), got {type(state).__name__}")
    if "version" not in state:
        found = ", ".join(map(str, state)) or "(none)"
        raise StateError(f"this is not a shardio state: it has no key 'version'; its keys are: {found}")
    version = _read_integer(state, "version")
    if version != STATE_VERSION:
        raise StateError(
            f"the state has version {state['version']!r}, but this version of shardio reads version {STATE_VERSION}: "
            "resume with the version of shardio that saved the state"
        )
    here = dump_state(Cursor(epoch=0), settings, digest, num_samples)
    saved = {part: values if isinstance(values := state.get(part), dict) else {} for part in ("dataset", "order")}
    differences = [
        f"{part}.{name} is {values.get(name)!r} in the state and {value!r} here"
        for part, values in saved.items()
        for name, value in here[part].items()
        if values.get(name) != value
    ]
    if differences:
        raise StateError(
            f"the state belongs to another dataset or order ({'; '.join(differences)}): use the dataset and the "
            "settings that it was saved with, or start from the beginning without it"
        )
    epoch, position = _read_integer(state, "epoch"), _read_integer(state, "position")
    if epoch is None or not 0 <= epoch < MAX_EPOCH:
        raise StateError(
            f"the state's epoch must be an integer, at least 0 and below 2**62, got {state.get('epoch')!r}"
        )
    if position is None or not 0 <= position <= num_samples:
        raise StateError(
            f"the state's position must be an integer from 0 to {num_samples}, got {state.get('position')!r}"
        )
    return Cursor(epoch=epoch, position=position)


def _read_integer(state: dict[str, Any], name: str) -> int | None:
    """Return an integer of a state, or None if it is not one. Some checkpoints turn integers into numpy's."""
    try:
        return check_integer(name, state.get(name))  # type: ignore[arg-type]  # it may be anything
    except TypeError:
        return None
