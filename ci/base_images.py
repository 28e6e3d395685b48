#!/usr/bin/env python3
"""Pins base images by digest; run by `ci/lock-images --bases`.

For each `ARG …_IMAGE=NAME:TAG` in deploy/docker/Dockerfile.*, asks the registry for the digest of
the tag, and replaces the value with NAME:TAG@sha256:…. If images are given as arguments, prints
theirs instead.
"""

from __future__ import annotations

import json
import re
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

DOCKERFILES = Path(__file__).resolve().parents[1] / "deploy" / "docker"
TIMEOUT_S = 30.0
ACCEPTED = ", ".join(
    (
        "application/vnd.oci.image.index.v1+json",
        "application/vnd.docker.distribution.manifest.list.v2+json",
        "application/vnd.oci.image.manifest.v1+json",
        "application/vnd.docker.distribution.manifest.v2+json",
    )
)
_BASE = re.compile(r"^(ARG \w+_IMAGE=)(\S+)$", flags=re.MULTILINE)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class Unresolved(Exception):
    """A registry returned no digest for a tag; the message names the image and the reason."""


def main(images: list[str]) -> int:
    """Pin the Dockerfiles' images, or print the given ones pinned; returns the exit status."""
    known: dict[str, str] = {}
    try:
        for image in images:
            print(pinned(image))
        for path in () if images else sorted(DOCKERFILES.glob("Dockerfile.*")):
            for line in rewrite(path, known):
                print(f"{path.name}: {line}")
    except Unresolved as exc:
        print(f"ci/lock-images: {exc}", file=sys.stderr)
        return 1
    return 0


def rewrite(path: Path, known: dict[str, str]) -> list[str]:
    """Pin the base images of one Dockerfile; returns them with their digests.

    Args:
        path: the Dockerfile.
        known: pinned names by image, so that all files get the same digests; extended.
    """
    text = path.read_text()
    found = []
    for _, image in _BASE.findall(text):
        tagged = image.partition("@")[0]
        if tagged not in known:
            known[tagged] = pinned(tagged)
        text = text.replace(f"_IMAGE={image}\n", f"_IMAGE={known[tagged]}\n")
        found.append(known[tagged])
    path.write_text(text)
    return found


def pinned(image: str) -> str:
    """``NAME:TAG@DIGEST`` for ``NAME:TAG``: the current digest of the multi-platform image.

    Raises:
        Unresolved: the registry is unreachable, or does not know the tag.
    """
    name, _, tag = image.partition("@")[0].rpartition(":")
    first, _, rest = name.partition("/")
    is_host = "." in first or ":" in first or first == "localhost"
    host, path = (first, rest) if is_host else ("registry-1.docker.io", name)
    if not is_host and "/" not in path:
        path = f"library/{path}"
    scheme = "http" if host.partition(":")[0] in ("localhost", "127.0.0.1") else "https"
    url = f"{scheme}://{host}/v2/{path}/manifests/{tag}"
    try:
        digest = _digest_at(url)
    except (OSError, ValueError, KeyError) as exc:
        raise Unresolved(f"can't resolve {image} at {host}: {exc}") from exc
    if _DIGEST.fullmatch(digest) is None:
        raise Unresolved(f"wanted the digest of {image} from {host}, found {digest!r}")
    return f"{name}:{tag}@{digest}"


def _digest_at(url: str) -> str:
    """The digest that a registry returns for a manifest's URL, with a token if it requires one."""
    asked = urllib.request.Request(url, method="HEAD", headers={"Accept": ACCEPTED})
    try:
        answer = urllib.request.urlopen(asked, timeout=TIMEOUT_S)
    except urllib.error.HTTPError as exc:
        if exc.code != 401:
            raise
        asked.add_header("Authorization", f"Bearer {_token(exc.headers['WWW-Authenticate'])}")
        answer = urllib.request.urlopen(asked, timeout=TIMEOUT_S)
    with answer:
        return str(answer.headers["Docker-Content-Digest"])


def _token(challenge: str) -> str:
    """An anonymous token from the realm that a registry's challenge names."""
    fields = dict(re.findall(r'(\w+)="([^"]*)"', challenge))
    query = urllib.parse.urlencode({k: fields[k] for k in ("service", "scope") if k in fields})
    with urllib.request.urlopen(f"{fields['realm']}?{query}", timeout=TIMEOUT_S) as answer:
        body = json.load(answer)
    return str(body.get("token") or body["access_token"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
