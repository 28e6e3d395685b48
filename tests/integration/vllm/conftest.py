from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from support.metaserver import Post


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """An exit stack that closes the resources of a test."""
    with ExitStack() as opened:
        yield opened


@pytest.fixture
def post(stack: ExitStack) -> Post:
    """A metaserver to which D posts the blocks that it has reserved."""
    server = Post()
    stack.callback(server.close)
    return server
