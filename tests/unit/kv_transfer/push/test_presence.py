"""Who may say that a writer is dead: our own kernel, of what listened on this very host."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.ports import free_range

from mooncake_engine.errors import KVTransferError, PeerAbsent, PeerGone
from mooncake_engine.kv_transfer.protocol import Standing, Writer
from mooncake_engine.kv_transfer.push import presence
from mooncake_engine.kv_transfer.push.presence import inquire


class Book:
    """One peer, whoever answers there.

    Args:
        answers_as: its incarnation.
    """

    def __init__(self, answers_as: str = "p-1") -> None:
        self.forgotten: list[str] = []
        self._answers_as = answers_as

    def get(self, writer: Writer) -> Book:
        return self

    @property
    def client(self) -> Book:
        return self

    async def ask(self, make: Any, kind: type[Standing], *, tries: int) -> Standing:
        return Standing(1, self._answers_as, tuple(make(1).request_ids), ())

    def forget(self, writer: Writer, reason: str) -> None:
        self.forgotten.append(reason)


def ask(book: Book, host: str, port: int, *, is_near: bool) -> Standing:
    writer = Writer("p-1", "a", host, port)
    return asyncio.run(inquire(writer, ["a"], book, is_near=is_near))  # type: ignore[arg-type]


@pytest.mark.parametrize(("is_near", "error"), [(True, PeerGone), (False, PeerAbsent)])
def test_who_is_refused(is_near: bool, error: type[KVTransferError]) -> None:
    book = Book()
    with pytest.raises(error, match=r"p-1 is .*nobody listens"):
        ask(book, "127.0.0.1", free_range(1).first, is_near=is_near)
    assert book.forgotten == ["nobody listens there now"]


@pytest.mark.parametrize(("is_near", "error"), [(True, PeerGone), (False, PeerAbsent)])
def test_who_finds_somebody_else(
    is_near: bool, error: type[KVTransferError], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence, "_knock", _is_let_in)
    with pytest.raises(error, match="p-2 listens"):
        ask(Book("p-2"), "127.0.0.1", 1, is_near=is_near)


def test_who_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "_knock", _is_let_in)
    assert ask(Book(), "127.0.0.1", 1, is_near=False).running == ("a",)


@pytest.mark.parametrize(
    ("host", "is_ours"),
    [("127.0.0.1", True), ("localhost", True), ("192.0.2.1", False), ("host.invalid", False)],
)
def test_whose_address_it_is(host: str, is_ours: bool) -> None:
    assert asyncio.run(presence._is_own_address(host)) == is_ours


async def _is_let_in(writer: Writer) -> None:
    """Somebody listens."""
