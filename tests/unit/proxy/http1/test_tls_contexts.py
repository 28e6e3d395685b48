"""What is wrong with a certificate or key is said, with the option that names it."""

from __future__ import annotations

import ssl
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from support.proxy_fakes_client import make_certificate

from mooncake_proxy.config import TlsConfig
from mooncake_proxy.errors import ConfigError
from mooncake_proxy.http1.tls_contexts import ServerCertificate, expiry_of, server_tls


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
    certificate, _ = server_tls(TlsConfig(str(pem / "both")))
    assert certificate == (pem / "both").read_bytes()


def presented_by(server: ssl.SSLContext) -> bytes | None:
    """The certificate that a client gets which names no server."""
    client = ssl.create_default_context()
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    asked, answered = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (client.wrap_bio(answered, asked), server.wrap_bio(asked, answered, server_side=True))
    for end in ends * 2:
        with suppress(ssl.SSLWantReadError):
            end.do_handshake()
    return ends[0].getpeercert(binary_form=True)


def self_signed(folder: Path, *options: str) -> tuple[TlsConfig, bytes]:
    """Write a certificate and its key. Returns their names, and the certificate."""
    config = TlsConfig(str(folder / "cert"), str(folder / "key"))
    command = ["openssl", "req", "-x509", "-nodes", "-subj", "/CN=x", *options]
    files = ["-out", str(config.certificate), "-keyout", str(config.key)]
    subprocess.run([*command, *files], check=True, capture_output=True)
    return config, ssl.PEM_cert_to_DER_cert((folder / "cert").read_text())


EC = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256")


def test_a_reloaded_certificate_takes_the_place_of_one_of_another_kind(tmp_path: Path) -> None:
    config, first = self_signed(tmp_path, *EC)
    certificate = ServerCertificate(config)
    assert presented_by(certificate.context) == first
    _, second = self_signed(tmp_path, "-newkey", "rsa:2048", "-days", "9")
    not_after = certificate.not_after
    certificate.reload()
    assert presented_by(certificate.context) == second
    assert certificate.not_after != not_after


def test_a_broken_certificate_leaves_the_former_one(tmp_path: Path, pem: Path) -> None:
    config, first = self_signed(tmp_path, *EC)
    certificate = ServerCertificate(config)
    (tmp_path / "key").write_bytes((pem / "key").read_bytes())
    with pytest.raises(ConfigError, match="key values mismatch"):
        certificate.reload()
    assert presented_by(certificate.context) == first


@pytest.mark.parametrize("days", [1, 20_000], ids=["UTCTime", "GeneralizedTime"])
def test_expiry_is_the_one_that_openssl_reads(tmp_path: Path, days: int) -> None:
    config, _ = self_signed(tmp_path, *EC, "-days", str(days))
    assert config.certificate is not None
    command = ["openssl", "x509", "-noout", "-enddate", "-in", config.certificate]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    text = said.strip().removeprefix("notAfter=")
    pem = b"a comment\n" + Path(config.certificate).read_bytes()
    assert expiry_of(pem) == ssl.cert_time_to_seconds(text)
    assert expiry_of(pem.replace(b"M", b"N")) is None
