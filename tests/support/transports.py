"""Helpers of the transports' tests."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

import pytest


def tls_settings() -> dict[str, str]:
    """Return additional settings of tcp: a self-signed certificate for the loopback addresses."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs the openssl program to make a certificate")
    return dict(_certificate(openssl))


@lru_cache(maxsize=1)
def _certificate(openssl: str) -> tuple[tuple[str, str], ...]:
    folder = Path(tempfile.mkdtemp(prefix="mooncake-test-tls-"))
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    names = "subjectAltName=IP:127.0.0.1,IP:::1"
    command = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"]
    command += ["-subj", "/CN=test", "-addext", names, "-out", str(certificate)]
    command += ["-keyout", str(key)]
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    return (
        ("tls_certificate", str(certificate)),
        ("tls_key", str(key)),
        ("tls_authority", str(certificate)),
    )
