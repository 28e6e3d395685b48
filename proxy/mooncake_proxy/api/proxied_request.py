"""One client request: its context, shared by all parts of the proxy, and its bodies for instances.

The application creates a `RequestContext` per request; the flows read and update it.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import Raw, Struct, field

from mooncake_api import RequestRejected
from mooncake_api.instance_protocol import (
    BATCH_PRIORITY,
    SAFE_REQUEST_ID,
    TIMEOUT_HEADER,
    UNSAFE_REQUEST_ID,
)
from mooncake_proxy.api.openai_bodies import (
    Fields,
    OpenAIEndpoint,
    ParsedRequest,
    encode,
    has_media,
    is_batch,
    is_null,
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

# Client headers forwarded to instances. Trace headers only if the proxy creates no spans itself.
FORWARDED = (b"authorization",)
FORWARDED_UNTRACED = (*FORWARDED, b"traceparent", b"tracestate")
_TIMEOUT_HEADER = TIMEOUT_HEADER.lower().encode()
_SAFE_ID = re.compile(SAFE_REQUEST_ID.encode())
_BYTES_PER_TOKEN = 4
MAX_COST_TOKENS = 1024 * 1024
"""New tokens that a request is charged for at most, until it ends: no instance generates as many as
a client may ask for, and one such charge would outweigh all others of its API key."""
INLINE_TRANSLATED_BYTES = 256 * 1024
GENERATED_TOKENS = "generated_token_ids"
"""The field of our instances with the answer's first tokens, which another one has generated."""
_LIST_BEGINS = ord("[")


def _request_ids() -> Iterator[str]:
    """Ids that are unique across processes, without a system call per request.

    32 hex digits: a random prefix per process, and a counter.
    """
    prefix = os.urandom(8).hex()
    for number in itertools.count(int.from_bytes(os.urandom(4), "big")):
        yield f"{prefix}{number:016x}"


_ids = _request_ids()


def _renew_ids() -> None:
    global _ids
    _ids = _request_ids()


os.register_at_fork(after_in_child=_renew_ids)  # workers are forked once this is imported


def new_request_id() -> str:
    """An id that no other request has, in this process or another."""
    return next(_ids)


def request_id_of(headers: dict[bytes, bytes], in_body: str | None = None) -> str:
    """The client's X-Request-Id if it is safe in headers and logs, else the body's `request_id`,
    else a new one, as instances do.

    Raises:
        BadRequest: the body's would be used, and is not safe.
    """
    given = headers.get(b"x-request-id")
    if given is not None and _SAFE_ID.fullmatch(given):
        return given.decode("ascii")
    if in_body is None:
        return new_request_id()
    if not _SAFE_ID.fullmatch(in_body.encode()):
        raise BadRequest(UNSAFE_REQUEST_ID, param="request_id")
    return in_body


class StreamTiming:
    """When the tokens of a stream were sent to its client. Loop times in seconds.

    `num_gaps` counts the gaps between tokens, `num_late` those longer than the TBT objective.
    """

    __slots__ = ("first_at", "last_at", "num_gaps", "num_late")

    def __init__(self) -> None:
        self.first_at: float | None = None
        self.last_at: float | None = None
        self.num_gaps = 0
        self.num_late = 0

    def begin(self, now: float) -> None:
        """Note that the first token is sent."""
        self.first_at = self.last_at = now

    def verdicts(
        self, arrival: float, ttft_s: float | None, tbt_s: float | None, *, is_whole: bool
    ) -> Iterator[tuple[str, bool]]:
        """Yield each configured objective, and whether the ended stream met it.

        A failed stream (not `is_whole`) meets none. TBT is met if at most a tenth of the gaps was
        too long.
        """
        if ttft_s is not None:
            is_first_timely = self.first_at is not None and self.first_at - arrival <= ttft_s
            yield "ttft", is_whole and is_first_timely
        if tbt_s is not None:
            yield "tbt", is_whole and 10 * self.num_late <= self.num_gaps


class RequestContext(Struct, eq=False):
    """State of one client request across all its attempts and passes.

    `arrival` and `deadline` are loop times in seconds.
    """

    request: HttpRequest
    endpoint: OpenAIEndpoint
    parsed: ParsedRequest
    fields: Fields
    request_id: str
    arrival: float
    deadline: float
    # Estimated from the body, or counted by the tokenizer.
    prompt_tokens: int
    # Header lines forwarded to every instance.
    forward: bytes = b""
    # The chosen data-parallel rank by instance name, for instances with several ranks.
    dp_ranks: dict[str, DPRank] | None = None
    # Incremented whenever a step is sent again; from 1 on it is part of the attempt's id.
    attempt: int = 0
    # The body as received; its hash identifies quarantined requests.
    client_body: bytes = b""
    # Instances that died or hung up while they worked on a request with this body.
    num_losses: int = 0
    # Instances on which the stream started but could not finish; avoided while there are others.
    avoided: tuple[Instance, ...] = ()
    # True once an instance's own stream events went to the client: no failover from then on.
    is_committed: bool = False
    # Id of the answer once the client has seen it; replaces D's id from then on.
    answer_id: str | None = None
    # Called when D has started to stream, before its events are forwarded: sends P's token.
    on_accepted: Callable[[], None] | None = None
    # Token ids of all passes, if there may be several.
    record: TokenRecord | None = None
    session: str | None = None
    prefix_blocks: tuple[int, ...] = ()
    cached_tokens: Mapping[str, int] | None = None
    # Uncached tokens of a short prompt that D computes; 0 from the first token on.
    num_short_tokens: int = 0
    timing: StreamTiming = field(default_factory=StreamTiming)
    # The prompt's token ids, if the proxy tokenized it or the client sent them.
    token_ids: Sequence[int] | None = None
    # The conductor's placement.
    routed: RoutedRequest | None = None
    # The keys file's entry for the request's API key; None without one.
    tenant: ApiKey | None = None
    # Response header lines with what remains of the key's rate limits.
    limit_headers: bytes = b""
    # Stream events sent to the client; counted only for requests with a tenant.
    num_events: int = 0
    # Tokens of prompt and answer, from the `usage` of a non-streamed answer.
    num_used_tokens: int | None = None
    # Tokens of the answer that are part of `prompt_tokens`, in later passes.
    num_generated: int = 0
    # The spans of a traced request.
    trace: RequestTrace | None = None
    # For the access log: the instances that took part.
    prefiller: str = ""
    decoder: str = ""

    @property
    def request_class(self) -> str:
        """`interactive` or `batch`."""
        return "batch" if (self.parsed.priority or 0) >= BATCH_PRIORITY else "interactive"

    @property
    def continues_answer(self) -> bool:
        """Whether the client has the beginning of the answer: its stream goes on behind it."""
        given = self.fields.get(GENERATED_TOKENS)
        return given is not None and not is_null(given)

    @property
    def attempt_id(self) -> str:
        """Id of the current attempt: the request's id, then that id with `-1`, `-2`..."""
        return f"{self.request_id}-{self.attempt}" if self.attempt else self.request_id

    @property
    def reply_headers(self) -> bytes:
        """Header lines of every response to this request."""
        return b"x-request-id: %b\r\n%b" % (self.request_id.encode("ascii"), self.limit_headers)

    @property
    def cost_tokens(self) -> int:
        """Upper bound of the request's tokens: prompt plus requested new tokens of all choices, of
        which MAX_COST_TOKENS count."""
        limit = self.parsed.token_limit
        per_answer = 0 if limit is None else max(limit, 0) + self.num_generated
        requested = per_answer * max(self.parsed.n or 1, 1)
        return self.num_client_tokens + min(requested, MAX_COST_TOKENS)

    @property
    def spent_tokens(self) -> int:
        """Tokens that the request has really used so far: those of the answer's `usage`, or else
        its prompt, if an instance was asked, and one for each event of the stream."""
        if self.num_used_tokens is not None:
            return self.num_used_tokens
        prompt = self.num_client_tokens if self.prefiller or self.decoder else 0
        return prompt + max(self.num_events, int(self.timing.first_at is not None))

    @property
    def num_client_tokens(self) -> int:
        """Length of the client's prompt in tokens, estimated or counted."""
        return self.prompt_tokens - self.num_generated

    def forward_to(self, instance: Instance) -> bytes:
        """Header lines for `instance`, including the data-parallel rank that the proxy has chosen,
        else the one that the client names."""
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
    """Header lines for instances. Headers that the client did not send are left out."""
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
    """Seconds that the whole request may take: the client's limit from header or body, and at most
    `limit_s`.

    A malformed value in the body is forwarded, and the instance refuses it.

    Raises:
        BadRequest: the header's value is no positive number.
    """
    if parsed.timeout is not None and parsed.timeout > 0.0:
        limit_s = min(limit_s, parsed.timeout)
    asked = headers.get(_TIMEOUT_HEADER)
    if asked is None:
        return limit_s
    try:
        seconds = float(asked)
    except ValueError:
        seconds = -1.0
    if not 0.0 < seconds < float("inf"):
        shown = asked.decode("latin-1")
        raise BadRequest(f"{TIMEOUT_HEADER} {shown!r}: wanted a positive number of seconds")
    return min(seconds, limit_s)


def estimate_prompt_tokens(endpoint: OpenAIEndpoint, parsed: ParsedRequest) -> int:
    """Rough number of prompt tokens: token ids are counted, text counts 1 token per 4 bytes, and
    inline media (`data:` URLs) count nothing."""
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
    """Placeholder translation of a request in another API's format, until its body has been read.

    Refusals that need no body, such as a missing API key, are answered in that API's error format.
    """

    def __init__(self, path: str) -> None:
        from mooncake_api.api_formats import API_FORMATS  # imported late to start faster

        self._format = API_FORMATS[path]

    async def translate(self, request: HttpRequest) -> None:
        """Replace the body by a chat request, and arrange that the answer is translated back.

        Long bodies are translated on a thread: 64 MiB take several seconds.

        Raises:
            BadRequest: a field is invalid; the error names it.
        """
        translate = self._format.translate
        try:
            if len(request.body) < INLINE_TRANSLATED_BYTES:
                translation = translate(request.body)
            else:
                loop = asyncio.get_running_loop()
                translation = await loop.run_in_executor(None, translate, request.body)
        except RequestRejected as exc:
            raise BadRequest(str(exc), param=exc.param) from exc
        request.body = translation.chat_body
        request.translation = translation

    def complete(self, status: int, body: bytes) -> tuple[int, bytes]:
        """Translate a whole response, which can only be an error."""
        return status, self._format.error(status, body)

    def events(self, data: bytes) -> bytes:
        """Stream events, unchanged: nothing is streamed before the body has been read."""
        return data


# ---------------------------------------------------------------- bodies for instances

# Tells P to hold the prompt's KV after the prefill, and to return where it is.
HOLD_KV_PARAMS = Raw(
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
    b'"remote_block_ids":null,"remote_host":null,"remote_port":null}'
)
_ONE = Raw(b"1")
FALSE = Raw(b"false")
TRUE = Raw(b"true")
_ENDS_OR_SHAPES_OUTPUT = (
    *("stop", "stop_token_ids", "min_tokens", "response_format", "structured_outputs"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
)
_UNFORCED = (b"null", b'"auto"', b'"none"')


def prefill_body(
    context: RequestContext,
    params: Raw = HOLD_KV_PARAMS,
    *,
    wants_token_ids: bool = False,
    is_single: bool = False,
    wants_kv_only: bool = False,
) -> bytes:
    """The body for P: one token, no stream.

    `min_tokens` is reduced but never added: the first token may be an EOS.

    Args:
        context: the request.
        params: its `kv_transfer_params` for P.
        wants_token_ids: ask for the token ids of the prompt and of P's token.
        is_single: ask for the first choice only; D starts the others itself.
        wants_kv_only: P's token is discarded, because D samples the first token of every choice;
            what shapes the output is removed, and stop conditions, so that P's token can't end the
            request. A forced tool call stays, since templates may show it; its grammar begins with
            more than an end, and our P refuses ``ignore_eos`` beside a grammar.
    """
    fields = context.fields.copy()
    if is_single or wants_kv_only:
        fields.pop("n", None)
        fields.pop("best_of", None)
    fields["stream"] = FALSE
    fields["max_tokens"] = _ONE
    if "max_completion_tokens" in fields:
        fields["max_completion_tokens"] = _ONE
    if context.parsed.min_tokens is not None and context.parsed.min_tokens > 1:
        fields["min_tokens"] = _ONE
    if wants_kv_only:
        for name in _ENDS_OR_SHAPES_OUTPUT:
            fields.pop(name, None)
        if bytes(fields.get("tool_choice", _UNFORCED[0])).strip() in _UNFORCED:
            fields["ignore_eos"] = TRUE
    fields.pop("stream_options", None)
    fields["kv_transfer_params"] = params
    if context.record is not None or wants_token_ids:
        fields["return_token_ids"] = TRUE
    return encode(fields)


def pull_decode_body(context: RequestContext, params: Raw, *, delivered: bool) -> bytes:
    """The body for D: the client's, plus P's parameters.

    `delivered` tells D whether the proxy delivers the first token itself.
    """
    fields = context.fields.copy()
    fields["kv_transfer_params"] = with_delivery(params, delivered=delivered)
    if context.record is not None:
        fields["return_token_ids"] = TRUE
    return encode(fields)


def with_delivery(params: Raw, *, delivered: bool) -> Raw:
    """P's parameters with `first_token_delivered` appended; the rest stays byte for byte."""
    inside = bytes(params).strip()[1:-1].rstrip()
    comma = b"," if inside else b""
    flag = b"true" if delivered else b"false"
    return Raw(b'{%b%b"first_token_delivered":%b}' % (inside, comma, flag))


def plain_body(context: RequestContext, instance: Instance) -> bytes:
    """The body for an instance that does both: the client's, with its `kv_transfer_params` replaced
    by the prefix sources that the conductor chose, if any."""
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
    """`params` plus the stores from which the conductor wants a cached prefix fetched.

    Unchanged unless `instance` is the one that the conductor chose for the prefill.
    """
    routed = context.routed
    if routed is None or not routed.prefix_sources or not routed.is_prefilled_by(instance):
        return params
    inside = bytes(params).strip()[1:-1].rstrip()
    comma = b"," if inside else b""
    return Raw(b'{%b%b"prefix_sources":%b}' % (inside, comma, encode(routed.prefix_sources)))
