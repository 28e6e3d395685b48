"""Section checksums, and reading sections with them; with and without the compiled kernels."""

import hashlib
import importlib.util
import itertools
import os
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from mooncake_kv.store import ssd_sections
from mooncake_kv.store.arena_allocator import GRANULE as PAGE
from mooncake_kv.store.ssd_sections import (
    interpreted_checksums,
    read_sections,
    section_checksums,
)


@pytest.mark.parametrize("checksums", [section_checksums, interpreted_checksums])
def test_checksums_detect_single_bits_and_swapped_pages(checksums):
    data = np.frombuffer(hashlib.shake_256(b"data").digest(8 * PAGE), np.uint8)

    def whole(payload):
        return int.from_bytes(checksums(memoryview(payload), 8 * PAGE), "little")

    assert whole(data) == 16507424934384734467
    for bit in (0, 7, 8 * PAGE + 3, 64 * PAGE - 1):
        flipped = data.copy()
        flipped[bit // 8] ^= 1 << bit % 8
        assert whole(flipped) != whole(data)
    pages = data.reshape(8, PAGE)
    exchanged = np.ascontiguousarray(pages[[1, 0, 2, 3, 4, 5, 6, 7]]).reshape(-1)
    assert whole(exchanged) != whole(data)


@pytest.mark.parametrize("checksums", [section_checksums, interpreted_checksums])
def test_each_section_has_its_own_checksum(checksums):
    data = memoryview(hashlib.shake_256(b"data").digest(8 * PAGE))
    sections = [data[start : start + 3 * PAGE] for start in range(0, 8 * PAGE, 3 * PAGE)]
    apart = [checksums(each, 3 * PAGE) for each in sections]  # the last section is shorter
    assert checksums(data, 3 * PAGE) == b"".join(apart)
    assert len(b"".join(apart)) == 3 * 8


@pytest.fixture(params=["compiled", "interpreted"])
def how(request, monkeypatch):
    if request.param == "interpreted":
        monkeypatch.setattr(ssd_sections, "_compiled", lambda: None)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(hashlib.shake_256(b"data").digest(8 * PAGE))
    descriptor = os.open(path, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def test_read_sections_returns_checksums(file, how):
    payload = memoryview(bytearray(5 * PAGE))
    found = read_sections(file, 2 * PAGE, payload, 2 * PAGE)
    wanted = os.pread(file, 5 * PAGE, 2 * PAGE)
    assert bytes(payload) == wanted
    assert found == interpreted_checksums(memoryview(wanted), 2 * PAGE)


def test_short_read_is_an_error(file, how):
    payload = memoryview(bytearray(5 * PAGE))
    with pytest.raises(OSError, match=f"{3 * PAGE} of {5 * PAGE} bytes"):
        read_sections(file, 5 * PAGE, payload, PAGE)
    directory = os.open("/", os.O_RDONLY)
    with pytest.raises(IsADirectoryError):
        read_sections(directory, 0, payload, PAGE)
    os.close(directory)


def test_concurrent_first_checksums_keep_their_weights_alive(monkeypatch):
    """One thread creates weights while another starts to use its own: neither's may be freed."""
    spec = importlib.util.find_spec(ssd_sections.__name__)
    sections = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sections)  # as in a process that has computed no checksum yet
    compiled = sections._compiled()
    if compiled is None:
        pytest.skip("only compiled code is given an address")
    data = memoryview(hashlib.shake_256(b"data").digest(2 * PAGE))
    found, calls, draw = [], itertools.count(), hashlib.shake_256

    def take():
        found.append(sections.section_checksums(data, PAGE))

    def checksums(*arguments):
        others = [np.ones(PAGE // 8, np.uint64) for _ in range(16)]  # freed memory is reused
        compiled.checksums(*arguments)
        others.clear()

    def overtaken(name):
        if next(calls) == 0:
            other = threading.Thread(target=take)
            other.start()
            other.join()
        return draw(name)

    monkeypatch.setattr(sections, "_compiled", lambda: compiled._replace(checksums=checksums))
    monkeypatch.setattr(sections, "hashlib", SimpleNamespace(shake_256=overtaken))
    take()
    assert set(found) == {interpreted_checksums(data, PAGE)}
