"""A prefill that the metaserver has started, beside the decode that waits for its KV."""

from __future__ import annotations

import asyncio

import pytest

from mooncake_proxy.errors import ConnectFailed
from mooncake_proxy.flows.metaserver import Metaserver


def test_complete_answer_is_kept_if_the_prefill_fails_at_the_same_time() -> None:
    """The client has it: a retry would answer the request twice."""

    async def main() -> None:
        with Metaserver().expect(_never) as session:
            decoding = asyncio.ensure_future(asyncio.sleep(0))
            await decoding
            session.failed.set_exception(ConnectFailed("p", "gone"))
            await session.supervise_decode(decoding)

    asyncio.run(main())


def test_failed_prefill_cancels_the_decode() -> None:
    async def main() -> None:
        with Metaserver().expect(_never) as session:
            decoding = asyncio.ensure_future(asyncio.sleep(60))
            session.failed.set_exception(ConnectFailed("p", "gone"))
            with pytest.raises(ConnectFailed):
                await session.supervise_decode(decoding)
            assert decoding.cancelled()

    asyncio.run(main())


async def _never(params: object) -> None:
    raise AssertionError("no reservation was posted")
