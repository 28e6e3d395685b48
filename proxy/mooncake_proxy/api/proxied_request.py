"""One client request on its way through the proxy."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import Raw, Struct, field

from mooncake_api import RequestRefused
from mooncake_proxy.api.openai_bodies import (
    Fields,
    OpenAIEndpoint,
    ParsedRequest,
    encode,
    has_media,
    is_batch,
)
from mooncake_proxy.errors import BadRequest
from mooncake_proxy.http1.http_request import HttpRequest
from mooncake_proxy.pool.dp_ranks import DP_RANK_HEADER

if TYPE_CHECKING:
    from mooncake_proxy.api.api_keys import ApiKey
    from mooncake_proxy.flows.token_record import TokenRecord
    from mooncake_proxy.ops.proxy_tracing import RequestTrace
    from mooncake_proxy.pool.dp_ranks import DPRank
    from mooncake_proxy.pool.instances import Instance
    from mooncake_proxy.routing.conductor_fleet import RoutedRequest

# Client headers forwarded to instances. Trace headers only where the proxy makes no spans.
FORWARDED = (b"authorization",)
FORWARDED_UNTRACED = (*FORWARDED, b"traceparent", b"tracestate")
TIMEOUT_HEADER = b"x-request-timeout"
_SANE_ID = re.compile(rb"[A-Za-z0-9._:\-]{1,128}")
_BYTES_PER_TOKEN = 4
_LIST_BEGINS = ord("[")
# Requests of this `priority`, or of a larger number, are batch work: nobody waits for them.
BATCH_PRIORITY = 1000

# An id that no other process makes, without a system call per request.
_id_prefix = os.urandom(8).hex()
_id_numbers = itertools.count(int.from_bytes(os.urandom(4), "big"))


def new_request_id() -> str:
    """32 hex digits: random per process, counted within it."""
    return f"{_id_prefix}{next(_id_numbers):016x}"


def request_id_of(headers: dict[bytes, bytes]) -> str:
    """The client's X-Request-Id if it is safe in headers and logs, else a new one."""
    given = headers.get(b"x-request-id")
    if given is not None and _SANE_ID.fullmatch(given):
        return given.decode("ascii")
    return new_request_id()


class StreamTiming:
    """When the tokens of a stream went to its client; loop times in seconds."""

    __slots__ = ("first_at", "last_at", "num_gaps", "num_late")

    def __init__(self) -> None:
        self.first_at: float | None = None
        self.last_at: float | None = None
        self.num_gaps = 0
        self.num_late = 0

    def begin(self, now: float) -> None:
        """The first token goes out."""
        self.first_at = self.last_at = now

    def verdicts(
        self, arrival: float, ttft_s: float | None, tbt_s: float | None, *, is_whole: bool
    ) -> Iterator[tuple[str, bool]]:
        """Each objective that there is, and whether a stream that is over has met it. One that
        failed has met none; TBT is met if at most a tenth of the gaps was too long."""
        if ttft_s is not None:
            is_first_timely = self.first_at is not None and self.first_at - arrival <= ttft_s
            yield "ttft", is_whole and is_first_timely
        if tbt_s is not None:
            yield "tbt", is_whole and 10 * self.num_late <= self.num_gaps


class RequestContext(Struct, eq=False):
    """One request in all its steps. `arrival` and `deadline` are loop times in seconds."""

    request: HttpRequest
    endpoint: OpenAIEndpoint
    parsed: ParsedRequest
    fields: Fields
    request_id: str
    arrival: float
    deadline: float
    # Estimated from the body, or counted by the tokenizer.
    prompt_tokens: int
    # Header lines that every instance gets.
    forward: bytes = b""
    # Of instances that have several data-parallel ranks, the one that was chosen, by instance.
    dp_ranks: dict[str, DPRank] | None = None
    # Grows with every step that is sent a second time; part of the id from then on.
    attempt: int = 0
    # As it came; its hash tells whether it is quarantined.
    client_body: bytes = b""
    # Instances that died or hung up while they worked on a request with this body.
    num_losses: int = 0
    # Those that its stream has begun at and could not end: not asked again while there are others.
    left: tuple[Instance, ...] = ()
    # True once an instance's own stream events went to the client: no failover from then on.
    is_committed: bool = False
    # The answer's id once the client has seen it; D's own is replaced from then on.
    answer_id: str | None = None
    # To be called once D streams and before anything of it is forwarded: P's token goes out then.
    on_accepted: Callable[[], None] | None = None
    # Token ids of all passes, where there may be several.
    record: TokenRecord | None = None
    session: str | None = None
    prefix_blocks: tuple[int, ...] = ()
    cached_tokens: Mapping[str, int] | None = None
    # Of a short prompt that D computes: its uncached tokens, until the first token.
    num_short_tokens: int = 0
    timing: StreamTiming = field(default_factory=StreamTiming)
    # Its token ids, where the proxy has made them or the client sent them.
    token_ids: Sequence[int] | None = None
    # Where the conductor has placed it.
    routed: RoutedRequest | None = None
    # Whose it is, where the keys file says more of its key than that it is good.
    tenant: ApiKey | None = None
    # Header lines that tell the key what is left of its limits.
    limit_headers: bytes = b""
    # Of its stream, where it has a tenant.
    num_events: int = 0
    # Tokens of prompt and answer, as the instance that gave the whole answer has counted them.
    num_used_tokens: int | None = None
    # Its spans, where requests are traced.
    trace: RequestTrace | None = None
    # For the log: which instances took part.
    prefiller: str = ""
    decoder: str = ""

    @property
    def request_class(self) -> str:
        """`interactive` or `batch`."""
        return "batch" if (self.parsed.priority or 0) >= BATCH_PRIORITY else "interactive"

    @property
    def attempt_id(self) -> str:
        """The id of the present attempt: the request's own, then `-1`, `-2`..."""
        return f"{self.request_id}-{self.attempt}" if self.attempt else self.request_id

    @property
    def reply_headers(self) -> bytes:
        """Header lines of every answer to this request."""
        return b"x-request-id: %b\r\n%b" % (self.request_id.encode("ascii"), self.limit_headers)

    @property
    def cost_tokens(self) -> int:
        """What it may come to, with all its answers: its prompt, and the new tokens it asks for."""
        per_answer = max(self.parsed.token_limit or 0, 0)
        return self.prompt_tokens + per_answer * max(self.parsed.n or 1, 1)

    def forward_to(self, instance: Instance) -> bytes:
        """Header lines for this instance, with the data-parallel rank that the client names or the
        proxy has chosen."""
        if self.dp_ranks is not None and (rank := self.dp_ranks.get(instance.name)) is not None:
            return self.forward + rank.header
        given = self.request.headers.get(DP_RANK_HEADER)
        if given is None or instance.has_other_ranks:
            return self.forward
        return b"%b%b: %b\r\n" % (self.forward, DP_RANK_HEADER, given)

    def disaggregation_obstacle(self) -> str | None:
        """Why prefill and decode stay together for this request, or None.

        One KV transfer carries one prompt that decoding continues; these requests need more.
        """
        parsed = self.parsed
        if parsed.use_beam_search or (parsed.best_of or 1) > (parsed.n or 1):
            return "beam_search"
        if parsed.echo:
            return "echo"
        if parsed.prompt_logprobs is not None:
            return "prompt_logprobs"
        if self.endpoint is OpenAIEndpoint.COMPLETION and is_batch(parsed.prompt):
            return "prompt_batch"
        return None


def forwarded_headers(
    headers: dict[bytes, bytes], names: tuple[bytes, ...] = FORWARDED_UNTRACED
) -> bytes:
    """Header lines for instances; absent ones are not sent (never `Bearer None`)."""
    lines = b""
    if b"x-api-key" in headers and b"authorization" not in headers:
        lines = b"authorization: Bearer %b\r\n" % headers[b"x-api-key"]
    if headers.keys().isdisjoint(names):
        return lines
    for name in names:
        if name in headers:
            lines += b"%b: %b\r\n" % (name, headers[name])
    return lines


def time_limit(headers: dict[bytes, bytes], parsed: ParsedRequest, limit_s: float) -> float:
    """Seconds that a request may take, in all its steps: what its client allows in header or body,
    and at most `limit_s`. A malformed value in the body is left for an instance to refuse."""
    if parsed.timeout is not None and parsed.timeout > 0.0:
        limit_s = min(limit_s, parsed.timeout)
    asked = headers.get(TIMEOUT_HEADER)
    if asked is None:
        return limit_s
    try:
        seconds = float(asked)
    except ValueError:
        seconds = -1.0
    if not 0.0 < seconds < float("inf"):
        raise BadRequest(f"X-Request-Timeout {asked!r}: wanted a positive number of seconds")
    return min(seconds, limit_s)


def estimate_prompt_tokens(endpoint: OpenAIEndpoint, parsed: ParsedRequest) -> int:
    """Prompt tokens, roughly: ids are counted, text is measured, pictures are not text."""
    if endpoint is OpenAIEndpoint.CHAT:
        raw = bytes(parsed.messages)
        if has_media(parsed.messages):
            raw = re.sub(rb'"data:[^"]*"', b'""', raw)
        return len(raw) // _BYTES_PER_TOKEN + 1
    prompt = memoryview(parsed.prompt)
    if prompt[0] == _LIST_BEGINS:
        return bytes(prompt).count(b",") + 1
    return len(prompt) // _BYTES_PER_TOKEN + 1


class UntranslatedRequest:
    """Stands in a request of another form than OpenAI's completions until its body is read: what is
    refused before, for want of a key, say, is refused in that form."""

    def __init__(self, path: str) -> None:
        from mooncake_api.api_formats import API_FORMATS  # a proxy that only starts needs none

        self._format = API_FORMATS[path]

    def translate(self, request: HttpRequest) -> None:
        """Make a chat request of it, whose answer is translated back. BadRequest names the wrong
        field."""
        try:
            translation = self._format.translate(request.body)
        except RequestRefused as exc:
            raise BadRequest(str(exc), param=exc.param) from exc
        request.body = translation.chat_body
        request.translation = translation

    def whole(self, status: int, body: bytes) -> tuple[int, bytes]:
        """An error."""
        return status, self._format.error(status, body)

    def events(self, data: bytes) -> bytes:
        """Nothing is streamed before the body is read."""
        return data


# ---------------------------------------------------------------- bodies for instances

# For P: prefill, hold the KV, return where it is.
HOLD_KV_PARAMS = Raw(
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
    b'"remote_block_ids":null,"remote_host":null,"remote_port":null}'
)
_ONE = Raw(b"1")
FALSE = Raw(b"false")
TRUE = Raw(b"true")


def prefill_body(
    context: RequestContext,
    params: Raw = HOLD_KV_PARAMS,
    *,
    wants_token_ids: bool = False,
    is_single: bool = False,
    wants_kv_alone: bool = False,
) -> bytes:
    """The body for P: one token, no stream. `min_tokens` only shrinks: EOS may come first.

    Args:
        context: of the request.
        params: its KV parameters.
        wants_token_ids: of the prompt and P's token.
        is_single: of the first answer alone; the others begin at D.
        wants_kv_alone: D samples the first token of all answers: P's is no one's, and ends nothing.
    """
    fields = context.fields.copy()
    if is_single or wants_kv_alone:
        fields.pop("n", None)
        fields.pop("best_of", None)
    fields["stream"] = FALSE
    fields["max_tokens"] = _ONE
    if "max_completion_tokens" in fields:
        fields["max_completion_tokens"] = _ONE
    if context.parsed.min_tokens is not None and context.parsed.min_tokens > 1:
        fields["min_tokens"] = _ONE
    if wants_kv_alone:
        for name in ("stop", "stop_token_ids", "min_tokens"):
            fields.pop(name, None)
        fields["ignore_eos"] = TRUE
    fields.pop("stream_options", None)
    fields["kv_transfer_params"] = params
    if context.record is not None or wants_token_ids:
        fields["return_token_ids"] = TRUE
    return encode(fields)


def pull_decode_body(context: RequestContext, params: Raw, *, delivered: bool) -> bytes:
    """The body for D: the client's own, with P's parameters and who delivers the first token."""
    fields = context.fields.copy()
    fields["kv_transfer_params"] = with_delivery(params, delivered=delivered)
    if context.record is not None:
        fields["return_token_ids"] = TRUE
    return encode(fields)


def with_delivery(params: Raw, *, delivered: bool) -> Raw:
    """P's parameters plus `first_token_delivered`, otherwise byte for byte."""
    inside = bytes(params).strip()[1:-1].rstrip()
    comma = b"," if inside else b""
    flag = b"true" if delivered else b"false"
    return Raw(b'{%b%b"first_token_delivered":%b}' % (inside, comma, flag))


def plain_body(context: RequestContext, instance: Instance) -> bytes:
    """The client's body without its kv_transfer_params, but with what the instance is to fetch."""
    params = with_prefix_sources(context, instance, Raw(b"{}"))
    if "kv_transfer_params" not in context.fields and len(params) == 2 and context.record is None:
        return context.request.body
    fields = context.fields.copy()
    fields.pop("kv_transfer_params", None)
    if len(params) > 2:
        fields["kv_transfer_params"] = params
    if context.record is not None:
        fields["return_token_ids"] = TRUE
    return encode(fields)


def with_prefix_sources(context: RequestContext, instance: Instance, params: Raw) -> Raw:
    """An instance's parameters plus the stores that the conductor has it fetch from, where it is
    the instance that was chosen for that."""
    routed = context.routed
    if routed is None or not routed.prefix_sources or not routed.is_prefilled_by(instance):
        return params
    inside = bytes(params).strip()[1:-1].rstrip()
    comma = b"," if inside else b""
    return Raw(b'{%b%b"prefix_sources":%b}' % (inside, comma, encode(routed.prefix_sources)))
