#!/usr/bin/env python3
"""Pins the images that ours are built from by digest: `ci/lock-images --bases`.

Asks the registry of each `ARG …_IMAGE=NAME:TAG` in deploy/docker/Dockerfile.* what its tag means
now, and writes NAME:TAG@sha256:… in its place; or prints that for the images that are named.
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
    """A registry does not say what a tag means; the message has the image and the reason."""


def main(images: list[str]) -> int:
    """Pin the Dockerfiles' images, or print those given; the exit status."""
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
    """Pin what one Dockerfile begins from; the images that it names then.

    Args:
        known: answers so far by image, so that two files get the same; added to.
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
    """``NAME:TAG@DIGEST`` of ``NAME:TAG`` as its registry has it now, for all platforms.

    Raises:
        Unresolved: it can't be asked, or does not know the tag.
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
        raise Unresolved(f"can't ask {host} what {image} means: {exc}") from exc
    if _DIGEST.fullmatch(digest) is None:
        raise Unresolved(f"wanted the digest of {image} from {host}, found {digest!r}")
    return f"{name}:{tag}@{digest}"


def _digest_at(url: str) -> str:
    """What a manifest's URL says of itself; a registry that asks for a token gets one."""
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
    """The token for anybody, from where a registry's challenge says."""
    fields = dict(re.findall(r'(\w+)="([^"]*)"', challenge))
    query = urllib.parse.urlencode({k: fields[k] for k in ("service", "scope") if k in fields})
    with urllib.request.urlopen(f"{fields['realm']}?{query}", timeout=TIMEOUT_S) as answer:
        body = json.load(answer)
    return str(body.get("token") or body["access_token"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
