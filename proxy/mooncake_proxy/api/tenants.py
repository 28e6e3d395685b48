"""Tenants: enforces the models and rate limits that a structured keys file gives to API keys."""

from __future__ import annotations

from msgspec import Struct
from msgspec.json import Decoder

from mooncake_proxy.api.api_keys import ApiKey, bearer_token
from mooncake_proxy.api.proxied_request import RequestContext
from mooncake_proxy.api.rate_limits import RateLimits
from mooncake_proxy.errors import DECODE_ERRORS, ModelNotFound, RateLimited
from mooncake_proxy.http1.upstream_connection import ClientContext
from mooncake_proxy.ops.proxy_metrics import ProxyMetrics


class Tenants:
    """The API keys with an entry in a structured keys file."""

    def __init__(
        self, keys: tuple[ApiKey, ...], client: ClientContext, metrics: ProxyMetrics
    ) -> None:
        self._by_key: dict[bytes, ApiKey] = {}
        # Loop time in seconds.
        self._now = client.loop.time
        self._metrics = metrics
        self.limits = RateLimits((), self._now())
        self.set_keys(keys)

    def set_keys(self, keys: tuple[ApiKey, ...]) -> None:
        """Replace the keys. The rate limits of those that stay are not reset."""
        self._by_key = {each.key.encode(): each for each in keys}
        self.limits.set_keys(keys, self._now())

    def of(self, headers: dict[bytes, bytes]) -> ApiKey | None:
        """The entry of the request's key, which must have been checked before; None without one."""
        return self._by_key.get(bearer_token(headers) or b"") if self._by_key else None

    def begin(self, tenant: ApiKey, context: RequestContext) -> None:
        """Begin a request, and charge its estimated tokens to the key's limits.

        Raises:
            ModelNotFound: the key may not use the model.
            RateLimited: the key has reached a limit.
        """
        if tenant.models and context.parsed.model not in tenant.models:
            raise ModelNotFound(context.parsed.model or "")
        if tenant.name not in self.limits:
            return
        now = self._now()
        try:
            self.limits.take(tenant.name, context.cost_tokens, now)
        except RateLimited as error:
            self._metrics.rate_limited.add(tenant.name, error.type)
            context.tenant = None  # nothing was charged, so `end` must not settle
            raise
        finally:
            context.limit_headers = self.limits.headers(tenant.name, now)

    def recount(self, context: RequestContext, charged: int) -> None:
        """Correct the charge of ``charged`` tokens now that the prompt's tokens are counted."""
        tenant = context.tenant
        if tenant is not None and tenant.name in self.limits:
            self.limits.settle(tenant.name, context.cost_tokens - charged)
            context.limit_headers = self.limits.headers(tenant.name, self._now())

    def end(self, context: RequestContext) -> None:
        """End a request: charge the tokens really used."""
        tenant = context.tenant
        if tenant is None or tenant.name not in self.limits or not context.limit_headers:
            return
        self.limits.settle(tenant.name, context.spent_tokens - context.cost_tokens)


class _Usage(Struct):
    total_tokens: int | None = None


class _Answer(Struct):
    usage: _Usage | None = None


_decoder = Decoder(_Answer)


def used_tokens(body: bytes) -> int | None:
    """Tokens of prompt and answer, from the `usage` of a whole answer; None without one."""
    try:
        usage = _decoder.decode(body).usage
    except DECODE_ERRORS:
        return None
    return None if usage is None else usage.total_tokens
