from __future__ import annotations

import pytest

from shardio.errors import StateError
from shardio.order import Cursor, OrderSettings, dump_state, read_state


@pytest.mark.parametrize("part", ["dataset", "order"])
@pytest.mark.parametrize("value", ["text", 3, [1], None, {}])
def test_a_state_with_a_part_of_another_type_is_refused(part: str, value: object) -> None:
    settings = OrderSettings(shuffle=True, seed=0, lanes=1, window=10)
    state = dump_state(Cursor(epoch=1, position=2), settings, "digest", 10)
    assert read_state(state, settings, "digest", 10) == Cursor(epoch=1, position=2)
    with pytest.raises(StateError, match=f"{part}.* in the state and .* here"):
        read_state({**state, part: value}, settings, "digest", 10)
