"""The scheduler side of the pull and push connectors: translates vLLM's hooks to calls of
``mooncake_kv``.

vLLM calls the hooks on its scheduler's thread. The connector's events arrive on the connector's
thread and are forwarded to the ranks, which report them to vLLM with their next step: vLLM accepts
such reports from workers only.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mooncake_hal.kv.geometry import AttentionKind
from mooncake_hal.latents import HALVES, PAIRS
from mooncake_kv.config import KVTransferConfig
from mooncake_kv.connector import (
    Connector,
    ConnectorFailed,
    Event,
    LeaseEnded,
    LoadEnded,
    find_connector,
)
from mooncake_kv.connector_worker import PushStep
from mooncake_kv.errors import InvalidKVParams
from mooncake_kv.handshake import InstanceMetadata
from mooncake_kv.kv_events import KVEvent
from mooncake_kv.numerics import ROPE_ORDER, Numerics
from mooncake_kv.params import (
    NO_KV_TRANSFER,
    FirstToken,
    KVTransferDict,
    KVTransferParams,
    TransferMode,
    parse_kv_transfer_params,
    parse_remote_address,
    parse_reservation,
)
from mooncake_vllm.rank_link import RankInfo, ReportLoad, ReportSend
from mooncake_vllm.remote_prompts import NOT_REQUESTED, RemotePrompts
from mooncake_vllm.vllm_interface import (
    NULL_BLOCK,
    P2P,
    BlockPool,
    KVCacheBlocks,
    Request,
    SchedulerOutput,
)
from mooncake_vllm.vllm_memory import join_tables
from mooncake_vllm.vllm_scheduler_base import Instance, SchedulerSideBase

logger = logging.getLogger(__name__)

COMPLETE = ("FINISHED_LENGTH_CAPPED",)
COMPLETE_FOR_WAITING = ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED")
"""Finish statuses of a prefill whose KV is transferred. If the first token ends the answer, no
decode instance is asked to pull the KV; one that has reserved blocks (push, early pull), however,
waits for it."""

LATER_CHOICE = re.compile(r"[1-9][0-9]*_")
"""Start of vLLM's ids for the choices of a request with ``n`` > 1, except the first, ``0_``."""

CONTINUES = "decode_continues_prompt"
"""Field of P's parameters: whether a decode instance like this one can be sent the prompt with P's
token appended."""


def transferred_prompt(request: Request) -> list[int]:
    """The tokens of a request's prompt that its peer was given: the whole prompt, without the
    token that the peer sampled if a proxy has appended it."""
    prompt, raw = request.prompt_token_ids or [], request.kv_transfer_params or {}
    is_continued = (
        bool(prompt and raw.get("do_remote_prefill"))
        and raw.get("first_token_delivered") is True
        and raw.get("num_prompt_tokens") == len(prompt) - 1
        and raw.get("last_token_id") == prompt[-1]
    )
    return prompt[:-1] if is_continued else prompt


@dataclass(slots=True)
class SentRequest:
    """A request whose KV goes to a peer.

    Args:
        request: vLLM's request.

    Attributes:
        num_cached: number of cached prompt tokens, once it has run.
        num_preemptions: its number of preemptions when it last started or restarted; None if it
            never ran.
    """

    request: Request
    num_cached: int | None = None
    num_preemptions: int | None = None

    @property
    def has_run_blocks(self) -> bool:
        """Whether steps have computed KV in its blocks; otherwise no send reads them."""
        return self.num_preemptions == self.request.num_preemptions


class SchedulerSide(SchedulerSideBase):
    """Sends and loads prompts' KV, by pull or push.

    Args:
        config: the connector's configuration.
        instance: properties of this instance.
        paths: Unix sockets of the workers, by rank.

    Raises:
        KVConfigError: the ranks did not connect or differ in their KV, or a port is taken.
    """

    def __init__(self, config: KVTransferConfig, instance: Instance, paths: Sequence[Path]) -> None:
        entry = find_connector(config.connector)
        self._mode: TransferMode = entry.mode
        self._connector: Connector = entry(config, instance.num_ranks)
        self._instance = instance
        self._lease_s = config.lease_s
        self._prompts = RemotePrompts()
        self._sending: dict[str, SentRequest] = {}  # that have not ended
        # Those of them whose peer has reserved blocks, and waits: push and early pull.
        self._awaited: set[str] = set()
        self._held: set[str] = set()  # finished requests whose blocks are held
        self.num_refused = 0
        self._has_separate_choices = False
        super().__init__(instance, paths)
        try:
            self._start()
        except BaseException:
            self._ranks.close()
            raise

    def _start(self) -> None:
        info = self._ranks.info
        self._blocks_per_page = info.blocks_per_page
        self._block_tokens = info.block_size
        self._page_tokens = info.block_size * info.blocks_per_page
        self._groups = info.geometry.tables
        self._ranks.listen(self._connector.on_rank_message)
        self._connector.start(
            InstanceMetadata(
                self._instance.engine_id,
                self._instance.model.weights,
                "",  # no tokenizer: vLLM's connectors see token ids only
                info.geometry,
                info.block_size,
                info.hardware,
                model_settings=self._instance.model.settings,
                numerics=_numerics(info),
            ),
            send=self._ranks.send,
            post=self._on_event,
            has_stalled=self._has_stalled,
        )

    # ------------------------------------------------------------- vLLM's hooks

    def on_new_request(self, request: Request) -> None:
        """Process a new request: parse its parameters, once."""
        self.check_alive()
        self._steps.arrive()
        if self.is_waiting:
            self._ranks.wake_up()
        raw = request.kv_transfer_params
        if not raw:
            return
        params = self._read(request, raw)
        request_id = request.request_id
        if params.keeps_kv:
            self._sending[request_id] = SentRequest(request)
            if params.target is not None:
                self._awaited.add(request_id)
                self._connector.on_new_request(request_id, params)
            return
        if params.remote is not None:
            key = params.remote.engine_id, params.remote.request_id
        elif params.metaserver is not None:
            key = params.metaserver, NOT_REQUESTED  # the URL is unique per attempt
        else:
            return
        if LATER_CHOICE.match(request_id) and not self._prompts.is_known(key):
            self._note_separate_choice(request_id)
            return
        tokens = transferred_prompt(request)
        if self._prompts.is_another(key, tokens):
            # Unlike after other refusals, the peer is not notified: its KV is still expected.
            logger.warning(
                "%s runs without KV transfer: its parameters name the KV of another request, whose "
                "prompt is not the same",
                request_id,
            )
            self.num_refused += 1
            return
        num_computed_here = len(request.prompt_token_ids or ()) - len(tokens)
        if self._prompts.expect(request_id, key, tokens, num_computed_here):
            self._connector.on_new_request(request_id, params)

    def get_num_new_matched_tokens(self, request: Request, num_computed: int) -> int | None:
        """Number of tokens that a request can load beyond its computed ones; None: ask again.
        No side effects."""
        self.check_alive()
        if request.skip_reading_prefix_cache:
            return 0
        return self._prompts.num_to_load(request.request_id, num_computed)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_tokens: int
    ) -> None:
        """Load a number of tokens into a request's new blocks; with 0, the request runs without
        the peer's KV."""
        request_id, prompt = request.request_id, transferred_prompt(request)
        if num_tokens:
            self._start_load(request, blocks, len(prompt) - num_tokens)
        elif name := self._prompts.skip(request_id):
            if self._prompts.is_held_by_peer(name):  # notifies it that it may free its blocks
                self._connector.start_load_kv(name, (), prompt, len(prompt))
            else:  # push, early pull: no prefill was requested yet
                self._connector.cancel_load(name)

    def hit_sources(self, request: Request, num_tokens: int) -> dict[str, int]:
        """Where the tokens that a request loads come from, see ``HIT_SOURCES``."""
        return {P2P: num_tokens}

    @property
    def is_waiting(self) -> bool:
        """Whether the end of a load, or the release of blocks, is still to be reported."""
        return bool(self._held) or self._prompts.is_loading

    @property
    def needs_steps(self) -> bool:
        """No: while blocks of requests are held, vLLM has steps for them."""
        return False

    def push_steps(self, step: SchedulerOutput) -> tuple[PushStep, ...]:
        """The parts of pushed prompts that a step computes. Also records the starts of sent
        requests, and how much of each prompt was cached at the first one."""
        if not self._sending:
            return ()
        for new in step.scheduled_new_reqs:
            # vLLM's newer model runner lists preempted requests here again.
            if (sent := self._sending.get(new.req_id)) is not None:
                sent.num_preemptions = sent.request.num_preemptions
                if sent.num_cached is None:
                    sent.num_cached = new.num_computed_tokens
        for name in step.scheduled_cached_reqs.resumed_req_ids:
            if (sent := self._sending.get(name)) is not None:
                sent.num_preemptions = sent.request.num_preemptions
        if self._mode is not TransferMode.PUSH:
            return ()
        found = [
            self._push_step(step, new.req_id, new.num_computed_tokens, new.block_ids, True)
            for new in step.scheduled_new_reqs
            if new.req_id in self._sending
        ]
        known = step.scheduled_cached_reqs
        columns = (known.req_ids, known.num_computed_tokens, known.new_block_ids)
        return (
            *found,
            *(
                self._push_step(step, name, done, blocks, name in known.resumed_req_ids)
                for name, done, blocks in zip(*columns, strict=True)
                if name in self._sending
            ),
        )

    def _push_step(
        self,
        step: SchedulerOutput,
        request_id: str,
        num_computed: int,
        tables: tuple[list[int], ...] | None,
        is_restart: bool,
    ) -> PushStep:
        stop = num_computed + step.num_scheduled_tokens[request_id]
        blocks = tuple(join_tables(tables, self._blocks_per_page)) if tables else ()
        if is_restart:
            return PushStep(request_id, stop, (), blocks)
        return PushStep(request_id, stop, blocks)

    def request_finished(
        self, request: Request, tables: Sequence[Sequence[int]]
    ) -> tuple[bool, KVTransferDict | None]:
        """Process the end of a request.

        Args:
            request: the request.
            tables: its block table in each KV-cache group.

        Returns:
            Whether its blocks are held until a report, and the ``kv_transfer_params`` of its
            answer.
        """
        self.check_alive()
        request_id = request.request_id
        if name := self._prompts.leave(request_id):
            self._connector.cancel_load(name)
        if (sent := self._sending.pop(request_id, None)) is None:
            return False, None
        is_awaited = request_id in self._awaited
        self._awaited.discard(request_id)
        prompt = request.prompt_token_ids or []
        is_whole = request.num_computed_tokens >= len(prompt) and self._has_all_blocks(
            tables, len(prompt)
        )
        is_complete = is_whole and request.status.name in (
            COMPLETE_FOR_WAITING if is_awaited else COMPLETE
        )
        if not is_complete and not is_awaited:
            return False, None
        if not is_complete and not sent.has_run_blocks:
            # Its blocks may be those of a load that another connector has in flight. vLLM frees
            # them at that load's end, and expects no other report.
            self._connector.cancel_send(request_id)
            return False, None
        self._held.add(request_id)
        try:
            if not is_complete:  # KV in flight is drained before the blocks are freed
                self._connector.cancel_send(request_id)
                return True, None
            params = self._connector.request_finished(
                request_id,
                self._prompt_table(tables, len(prompt)),
                prompt,
                FirstToken(request.output_token_ids[0], num_cached_tokens=sent.num_cached or 0),
                cache_salt=request.cache_salt or "",
            )
        except BaseException:
            self._held.discard(request_id)  # vLLM frees its blocks now, so no report may follow
            raise
        # With P's token appended, the prompt must still leave D a token to generate.
        continues = len(prompt) + 1 < self._instance.max_model_len
        return True, None if params is None else params | {CONTINUES: continues}

    def reset_cache(self) -> bool:
        """Nothing to do: these connectors store nothing."""
        return True

    def bind_gpu_block_pool(self, pool: BlockPool) -> None:
        """Nothing to do: these connectors don't use vLLM's prefix cache."""

    def take_events(self) -> Sequence[KVEvent]:
        """Return no events, as nothing is stored. vLLM calls this when it has a step's results,
        which ends the step for the watch."""
        self._steps.end()
        return ()

    def stats(self) -> dict[str, float]:
        """Metrics by name, since the start."""
        return self._connector.stats() | {
            "refused_requests": float(self.num_refused),
            "leases_held": float(len(self._held)),  # by vLLM's blocks, which may outlast the lease
        }

    def close(self) -> None:
        """Stop the connector, abandoning loads and held KV. Idempotent."""
        self._connector.close()
        self._ranks.close()

    # ------------------------------------------------------------- the rest

    def _has_stalled(self) -> bool:
        """Whether peers need not hold KV for this instance: a step hangs, or vLLM is paused before
        it has begun to load. A paused peer could otherwise not complete its own pause, as long as
        its leases are renewed. Any thread."""
        return self._steps.has_stalled() or (
            self._prompts.are_only_held_by_peers
            and self._steps.seconds_without_step() > self._lease_s
        )

    def _start_load(self, request: Request, blocks: KVCacheBlocks, start: int) -> None:
        """Start a load. From here on vLLM waits for a report, so every failure must send one."""
        request_id, prompt = request.request_id, transferred_prompt(request)
        name = self._prompts.begin(request_id)
        if name is None:  # the prompt was lost since vLLM asked
            self._ranks.report(ReportLoad(request_id, "", is_failed=True))
            return
        self._started.append(name)
        try:
            self._connector.start_load_kv(
                name,
                join_tables(blocks.get_block_ids(), self._blocks_per_page),
                prompt,
                start,
                cache_salt=request.cache_salt or "",
            )
        except BaseException:
            self._prompts.end(name)
            self._ranks.report(ReportLoad(request_id, name, is_failed=True))
            raise

    def _has_all_blocks(self, tables: Sequence[Sequence[int]], num_tokens: int) -> bool:
        """Whether block tables still have all blocks of a prompt that its decode needs."""
        needed = self._num_pages(num_tokens)
        firsts = [
            group.first_token(num_tokens, self._block_tokens) // self._page_tokens
            for group in self._groups
        ]
        return all(
            len(table) >= needed and NULL_BLOCK not in table[first:needed]
            for table, first in zip(tables, firsts, strict=True)
        )

    def _prompt_table(self, tables: Sequence[Sequence[int]], num_tokens: int) -> list[int]:
        """The connector's block table of a prompt, from vLLM's tables."""
        needed = self._num_pages(num_tokens)
        return join_tables([table[:needed] for table in tables], self._blocks_per_page)

    def _num_pages(self, num_tokens: int) -> int:
        """Number of vLLM's blocks that hold these tokens."""
        return -(-num_tokens // self._page_tokens)

    def _read(self, request: Request, raw: KVTransferDict) -> KVTransferParams:
        """Parse a request's parameters. If they can't be honoured, log it, and let the request run
        without KV transfer."""
        try:
            params = parse_kv_transfer_params(
                raw, transferred_prompt(request), request.cache_salt or ""
            )
            self._check_possible(request, params)
        except InvalidKVParams as exc:
            # vLLM's front end submits a request that it refused, aborted, so that P is notified.
            level = logging.INFO if request.abort_immediately else logging.WARNING
            logger.log(level, "%s runs without KV transfer: %s", request.request_id, exc)
            self.num_refused += not request.abort_immediately
            self._notify_peer(request.request_id, raw)
            return NO_KV_TRANSFER
        return params

    def _check_possible(self, request: Request, params: KVTransferParams) -> None:
        if params.mode is TransferMode.NONE:
            return
        wants = "do_remote_decode" if params.keeps_kv else "do_remote_prefill"
        if not (self._instance.sends if params.keeps_kv else self._instance.loads):
            raise InvalidKVParams(f"{wants}: this instance's kv_role does not allow it")
        if params.mode is not self._mode:
            raise InvalidKVParams(
                f"{wants}: the request wants KV transfer by {params.mode.value}, this instance's "
                f"connector does {self._mode.value}"
            )
        if not params.keeps_kv:
            self._check_windows(request)
        for what, found in (
            ("a LoRA adapter", request.lora_request),
            ("pictures or other media", request.mm_features),
            ("embeddings for a prompt", request.prompt_embeds),
        ):
            if found is not None and found != []:
                raise InvalidKVParams(
                    f"{wants}: the request has {what}, which its token ids don't identify; its KV "
                    "is not transferred"
                )

    def _check_windows(self, request: Request) -> None:
        """Refuse a load whose last prompt token is recomputed here if a sliding window makes that
        impossible. That token attends to one token further back than the answer's first token does.
        If a block boundary lies between the two, the prefill instance has dropped the block."""
        stop = len(transferred_prompt(request))
        if stop < len(request.prompt_token_ids or ()):  # the answer's first is computed next
            return
        for group in self._groups:
            first = stop - group.window + 1
            if group.window and first > 0 and first % self._block_tokens == 0:
                raise InvalidKVParams(
                    f"do_remote_prefill: of a prompt of {stop} tokens, a prefill keeps the tokens "
                    f"from {first} on for a sliding window of {group.window}, but the last token, "
                    "which is recomputed here, needs one more"
                )

    def _note_separate_choice(self, request_id: str) -> None:
        """Log, once, that a choice computes its prompt because vLLM gave the first choice to
        another data-parallel rank. The KV has one reader, which is the first choice's rank."""
        if not self._has_separate_choices:
            logger.warning(
                "%s runs without KV transfer: the first choice of its request is on another data-"
                "parallel rank, which reads the KV; to keep the choices of a request on one rank, "
                "name it in the header X-data-parallel-rank",
                request_id,
            )
        self._has_separate_choices = True

    def _notify_peer(self, request_id: str, raw: KVTransferDict) -> None:
        """Notify the peer of a request that runs without KV transfer, if any: the holder of its KV
        that it will not be read, or the instance that has reserved blocks for it that it will not
        arrive."""
        remote, reserved = parse_remote_address(raw), parse_reservation(raw)
        if remote is not None:
            self._connector.on_new_request(request_id, KVTransferParams(remote=remote))
            self._connector.cancel_load(request_id)
        elif reserved is not None:
            self._connector.on_new_request(request_id, reserved)
            self._connector.cancel_send(request_id)

    def _on_event(self, event: Event) -> None:
        """Process an event of the connector, on the connector's thread. There is nothing to do for
        ``SendRefused``: a connector can't end a request of vLLM that runs."""
        if isinstance(event, ConnectorFailed):
            self._die(event.cause)
        elif isinstance(event, LeaseEnded):
            if event.request_id in self._held:
                self._held.discard(event.request_id)
                self._ranks.report(ReportSend(event.request_id))
        elif isinstance(event, LoadEnded) and event.is_drained:
            is_failed = event.error is not None
            request_id = self._prompts.end(event.request_id, is_loaded=not is_failed)
            if request_id is not None:
                self._ranks.report(ReportLoad(request_id, event.request_id, is_failed))


def rope_order(info: RankInfo) -> str:
    """The order in which vLLM keeps the rope part of latents; empty if the model has none. vLLM
    keeps pairs, as the checkpoint does; other engines permute the weights and keep halves, and so
    does the op with which vLLM-Ascend writes its cache (npu_kv_rmsnorm_rope_cache)."""
    if info.geometry.kind is not AttentionKind.MLA:
        return ""
    return HALVES if info.hardware.backend == "npu" else PAIRS


def _numerics(info: RankInfo) -> Numerics:
    """The properties of vLLM's KV in which engines may differ."""
    order = rope_order(info)
    return Numerics({ROPE_ORDER: order} if order else {})
