from collections.abc import Iterator
from contextlib import ExitStack

import pytest


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Closes what a test opens in it."""
    with ExitStack() as opened:
        yield opened
