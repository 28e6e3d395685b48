from collections.abc import Iterator
from contextlib import ExitStack

import pytest


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """An exit stack that closes the resources of a test."""
    with ExitStack() as opened:
        yield opened
