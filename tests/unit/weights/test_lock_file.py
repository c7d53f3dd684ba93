"""The lock of a file: for one at a time, and with an end to waiting."""

from pathlib import Path

import pytest

from spo.errors import NotReady
from spo.weights.store import locked


def test_it_is_held_by_one_at_a_time_and_waiting_for_it_ends(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    with locked(path, 1), pytest.raises(NotReady, match="another process has held"), locked(path, 0):
        pass
    with locked(path, 0):
        pass
