from collections.abc import Iterator

import pytest
from support.rank_forker import RankForker

from mooncake_engine.execution import rank_launcher

START_FORKER = rank_launcher.start_forker


@pytest.fixture(scope="session")
def rank_forker() -> Iterator[RankForker]:
    forker = RankForker()
    yield forker
    forker.close()


@pytest.fixture(scope="module", autouse=True)
def _forks_ranks(rank_forker: RankForker) -> Iterator[None]:
    """Fork the ranks of engines in this process from a process with the imports done.

    Ranks of programs that tests run, and those of unit tests, are started as in production.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_launcher, "start_forker", rank_forker)
        yield


@pytest.fixture
def ranks_import_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start ranks as in production, for tests that change what ranks import."""
    monkeypatch.setattr(rank_launcher, "start_forker", START_FORKER)
