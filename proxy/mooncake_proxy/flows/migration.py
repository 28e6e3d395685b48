"""Continues a request on other instances, from the tokens generated so far.

There are two reasons to do so. D runs out of KV memory and returns the request for recomputation
(`stop_reason: "recomputed"`, vLLM-Ascend). Or, with `--migrate-streams`, the D that streams is lost
or shuts down (request migration, as Dynamo calls it). In both cases another pass of prefill and
decode starts. Instances of ours get the request as it was and the generated tokens, and continue
the answer in its middle; others get a completion whose prompt is the original prompt plus all
generated tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from msgspec import Raw

from mooncake_proxy.api.openai_bodies import (
    DEFAULT_MAX_TOKENS,
    Fields,
    OpenAIEndpoint,
    encode,
    parse_request,
)
from mooncake_proxy.api.proxied_request import GENERATED_TOKENS, RequestContext
from mooncake_proxy.errors import ConnectFailed, Recomputed, UpstreamError, is_draining, is_loss
from mooncake_proxy.flows.continued_prompt import (
    HISTORY_FIELDS,
    STRUCTURE_FIELDS,
    TRUNCATION_FIELDS,
    asks_for,
    can_continue,
)
from mooncake_proxy.flows.token_record import TokenRecord
from mooncake_proxy.pool.instances import Role
from mooncake_proxy.routing.retries import MAX_LOSSES
from mooncake_proxy.routing.router import RequestRouter

logger = logging.getLogger(__name__)

MAX_PASSES = 8
FIRST_PASS_FIELDS = {
    "messages", "tools", "tool_choice", "parallel_tool_calls", "max_completion_tokens",
    "chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message",
    "top_logprobs", "reasoning_effort", *TRUNCATION_FIELDS,
}  # fmt: skip
"""Fields that the completions of later passes, whose prompt is token ids, don't have: those that
shaped the prompt's token ids, and those of chat requests."""


def may_need_passes(router: RequestRouter) -> bool:
    """Whether requests may need more than one pass."""
    return router.pool.recomputes or router.config.migrates_streams


async def run_passes(
    router: RequestRouter,
    context: RequestContext,
    run_pass: Callable[[RequestRouter, RequestContext], Awaitable[None]],
) -> None:
    """Run passes until the answer is complete.

    Args:
        router: the router of the request's model.
        context: the request.
        run_pass: runs one prefill and decode, by the rules of the flow.
    """
    context.record = record = _start_record(router, context)
    try:
        await _run_passes(router, context, record, run_pass)
    except UpstreamError:
        # Events were held back for the next pass, but there is none: flush them.
        if record is not None and context.request.has_started and (events := record.release()):
            context.request.write(events)
        raise


async def _run_passes(
    router: RequestRouter,
    context: RequestContext,
    record: TokenRecord | None,
    run_pass: Callable[[RequestRouter, RequestContext], Awaitable[None]],
) -> None:
    while True:
        try:
            await run_pass(router, context)
        except UpstreamError as error:
            is_recomputed = isinstance(error, Recomputed)
            if record is None:
                raise
            if record.has_finished:
                includes_usage = context.parsed.includes_usage
                context.request.end(record.closing_events(includes_usage=includes_usage))
                return
            may_go_on = record.num_passes < MAX_PASSES and (
                is_recomputed or _may_migrate(router, context, record, error)
            )
            if not may_go_on or not _begin_next_pass(context, record):
                raise
            if is_recomputed:
                router.metrics.recomputed.add()
            else:
                router.metrics.migrated.add()
                context.avoided += tuple(i for i in router.pool if i.name == error.instance)
            logger.warning("request %s: continues elsewhere: %s", context.request_id, error)
        else:
            return


def _start_record(router: RequestRouter, context: RequestContext) -> TokenRecord | None:
    """A record if the request could be continued in another pass, else None.

    With several choices, token ids alone can't continue the answer. With tools or chat logprobs
    they can if the instances are told which of them are the answer's.
    """
    parsed = context.parsed
    is_chat = context.endpoint is OpenAIEndpoint.CHAT
    continues_answer = router.pool.continues_answers and _can_continue_answer(context)
    has_tools = is_chat and bool({"tools", "logprobs"} & context.fields.keys())
    if (parsed.n or 1) > 1 or (has_tools and not continues_answer):
        return None
    may_migrate = continues_answer or _can_migrate(context)
    may_migrate &= router.config.migrates_streams
    if not (may_migrate or router.pool.recomputes):
        return None
    record = TokenRecord(
        context.endpoint,
        shows_ids=bool(parsed.return_token_ids),
        may_migrate=may_migrate,
        continues_answer=continues_answer,
    )
    record.limit, record.min_tokens = parsed.token_limit, parsed.min_tokens or 0
    if record.limit is None and not is_chat:
        record.limit = DEFAULT_MAX_TOKENS
    return record


def _can_continue_answer(context: RequestContext) -> bool:
    """Whether instances that know which tokens are the answer's can generate the rest of it."""
    return bool(context.parsed.stream) and context.disaggregation_obstacle() is None


def _can_migrate(context: RequestContext) -> bool:
    """Whether the rest of a stream can be generated elsewhere from a prompt that ends with the
    tokens so far, without the client noticing."""
    return context.disaggregation_obstacle() is None and can_continue(context)


def _may_migrate(
    router: RequestRouter, context: RequestContext, record: TokenRecord, error: UpstreamError
) -> bool:
    """Whether a stream may be migrated after `error`.

    Like any other retry, a migration takes from the retry budget, unless the instance is shutting
    down. A request during which MAX_LOSSES instances were lost is not migrated again.
    """
    has_begun = context.is_committed or context.answer_id is not None or record.num_passes > 0
    if not record.may_migrate or not has_begun:
        return False
    if context.num_losses >= MAX_LOSSES or router.now() >= context.deadline:
        return False
    others = [
        each
        for each in (*router.pool.live(Role.DECODE), *router.pool.live(Role.BOTH))
        if each not in context.avoided and each.name != error.instance
    ]
    if record.continues_answer:
        others = [each for each in others if each.compatibility.continues_answers]
    if not others:
        return False
    if is_draining(error):
        return True
    return (is_loss(error) or isinstance(error, ConnectFailed)) and router.budget.take()


def _begin_next_pass(context: RequestContext, record: TokenRecord) -> bool:
    """Turn the request into one that continues from the tokens so far. If they don't determine the
    rest and the client has seen nothing, it is generated again from the start.

    Returns:
        False if that is impossible: the prompt's token ids are unknown, or the client has seen the
        beginning of an answer that a parser or a grammar has to follow from its start.
    """
    record.begin_next_pass()
    if record.continues_answer:
        _set_generated(context, record)
    elif record.generated or context.is_committed or context.answer_id is not None:
        if not context.parsed.stream and (
            record.is_parsed or asks_for(context.fields, HISTORY_FIELDS)
        ):
            record.reset_answer()
        elif not record.prompt or record.is_parsed or asks_for(context.fields, STRUCTURE_FIELDS):
            return False
        else:
            _set_continuation_body(context, record)
    context.attempt += 1
    context.answer_id = None
    context.is_committed = False
    context.on_accepted = None
    context.cached_tokens = None
    context.prefix_blocks = ()
    return True


def _set_generated(context: RequestContext, record: TokenRecord) -> None:
    """Tell the instances of the next pass which tokens of the answer the client has."""
    fields = context.fields.copy()
    if record.generated:
        fields[GENERATED_TOKENS] = Raw(encode(record.generated))
    _set_body(context, record, fields)


def _set_continuation_body(context: RequestContext, record: TokenRecord) -> None:
    """Make the request a completion whose prompt is the prompt so far and the generated tokens."""
    fields = {n: raw for n, raw in context.fields.items() if n not in FIRST_PASS_FIELDS}
    fields["prompt"] = Raw(encode(record.prompt + record.generated))
    _set_body(context, record, fields)
    context.endpoint = OpenAIEndpoint.COMPLETION


def _set_body(context: RequestContext, record: TokenRecord, fields: Fields) -> None:
    """Replace the request by the one of the next pass, with the limits that are left."""
    num_generated = len(record.generated)
    # None means "as many as fit", which only a chat request may ask for
    left = None if record.limit is None else max(1, record.limit - num_generated)
    fields["max_tokens"] = Raw(encode(left))
    if "max_completion_tokens" in fields:
        fields["max_completion_tokens"] = fields["max_tokens"]
    if record.min_tokens:
        fields["min_tokens"] = Raw(encode(max(0, record.min_tokens - num_generated)))
    context.request.body = body = encode(fields)
    context.parsed, context.fields = parse_request(body)
    num_prompt_tokens = len(record.prompt) or context.num_client_tokens
    context.prompt_tokens = num_prompt_tokens + num_generated
    context.num_generated = num_generated
    if record.prompt:
        context.token_ids = record.prompt + record.generated
