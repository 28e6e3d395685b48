"""What is wrong with a certificate or key is said, with the option that names it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from support.proxy_fakes_client import make_certificate

from mooncake_proxy.config import TlsConfig
from mooncake_proxy.errors import ConfigError
from mooncake_proxy.http1.tls_contexts import server_tls


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a certificate, its key, both, the key encrypted, and another key."""
    folder = tmp_path_factory.mktemp("pem")
    make_certificate(folder / "cert", folder / "key")
    make_certificate(folder / "other-cert", folder / "other-key")
    (folder / "both").write_bytes(b"".join((folder / n).read_bytes() for n in ("cert", "key")))
    encrypt = ["openssl", "pkcs8", "-topk8", "-passout", "pass:word"]
    files = ["-in", str(folder / "key"), "-out", str(folder / "locked")]
    subprocess.run([*encrypt, *files], check=True, capture_output=True)
    return folder


@pytest.mark.parametrize(
    ("certificate", "key", "message"),
    [
        ("cert", None, r"--tls-cert \S+/cert: wanted a private key .* with --tls-key"),
        ("key", "key", r"--tls-cert \S+/key: wanted a certificate as PEM"),
        ("cert", "cert", r"--tls-key \S+/cert: wanted a private key as PEM, found none$"),
        ("cert", "locked", r"--tls-key \S+/locked: .* needs no passphrase"),
        ("cert", "other-key", r"--tls-key \S+/other-key: .* key values mismatch"),
        ("cert", "absent", r"--tls-key \S+/absent: wanted a PEM file: No such file"),
    ],
)
def test_the_file_at_fault_is_named(
    pem: Path, certificate: str, key: str | None, message: str
) -> None:
    config = TlsConfig(str(pem / certificate), None if key is None else str(pem / key))
    with pytest.raises(ConfigError, match=message):
        server_tls(config)


def test_one_file_may_have_both(pem: Path) -> None:
    assert server_tls(TlsConfig(str(pem / "both"))) is not None
