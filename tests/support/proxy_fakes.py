"""Fake prefill and decode instances that speak the proxy's protocol and inject faults.

They generate the words ` t0 t1 t2 ...`: token k of any answer is ` t{k}`, so that a missing,
duplicated or foreign token shows in the text.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from mooncake_proxy.api.application import ProxyApplication
from mooncake_proxy.config import ProxyConfig
from mooncake_proxy.http1.http_wire import Origin
from mooncake_proxy.pool.health_checks import HealthConfig
from mooncake_proxy.pool.instance_reports import Compatibility
from mooncake_proxy.pool.instances import InstanceSpec, Role
from mooncake_proxy.pool.pair_topology import PairTopology

Json = dict[str, Any]
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)
CREATED = 1_700_000_000
# Token ids of any text prompt; generated token k has id 1000 + k.
PROMPT_IDS = [1, 2, 3, 4, 5, 6, 7]


def token_id(position: int) -> int:
    """The id of token `position` of every answer."""
    return 1000 + position


def num_generated_before(body: Json) -> int:
    """How many generated tokens the request already holds; the answer continues after them."""
    if known := body.get("generated_token_ids"):
        return len(known)
    prompt = (body.get("kv_transfer_params") or {}).get("prompt_token_ids") or body.get("prompt")
    return sum(i >= 1000 for i in prompt) if isinstance(prompt, list) else 0


def word(position: int) -> str:
    """Token `position` of every answer."""
    return f" t{position}"


def text_of(num_tokens: int, first: int = 0) -> str:
    """The text of an answer with that many tokens."""
    return "".join(word(position) for position in range(first, num_tokens))


@dataclass
class ReceivedRequest:
    """A request that an instance received."""

    method: str
    path: str
    headers: dict[str, str]
    body: Json


@dataclass
class Behaviour:
    """The faults that an instance injects. Changes apply to the next request."""

    # Status and body in place of an answer.
    status: int = 200
    error: Json = field(default_factory=lambda: {"error": {"message": "made to fail", "code": 1}})
    headers: dict[str, str] = field(default_factory=dict)
    # Never answer at all; the connection stays open.
    hangs: bool = False
    # Close the connection without an answer.
    drops: bool = False
    # The same, and stop listening.
    dies: bool = False
    delay_s: float = 0.0
    token_delay_s: float = 0.0
    # The answer of /tokenize; None: one token per byte.
    tokens: list[int] | None = None
    # How events are cut into network chunks: "one", "two" (two events per chunk), "split".
    cut: str = "one"
    # After that many events: die (close without [DONE]), hang, or send an error event.
    die_after: int | None = None
    hang_after: int | None = None
    error_after: int | None = None
    recompute_after: int | None = None
    # The same for the next time.
    recompute_again_after: int | None = None
    # Retried requests are spared the first three of these.
    spares_retries: bool = False
    error_code: int | str = 500
    # P: omit kv_transfer_params, or finish with the first token.
    has_params: bool = True
    stops_at_first: bool = False
    # The same if the prompt already holds generated tokens, that is, in a later pass.
    stops_later_passes: bool = False
    first_text: str | None = None
    # None: the id of the generated token.
    last_token_id: int | None = 100
    # D: a vLLM that does not know first_token_delivered.
    emits_first_token: bool = False
    # Status of /abort; vLLM has no such path.
    abort_status: int = 200
    # P: its D may be sent the prompt with the first token appended, to continue from there.
    continues_prompt: bool = False
    health: int = 200
    # Its health reports these numbers of running and waiting requests per data-parallel rank; None:
    # it does not even report how many ranks there are.
    dp_ranks: list[tuple[int, int]] | None = None
    # Its health reports this of the KVCache pool.
    kv_pool: Json | None = None
    # And these bytes received, by peer.
    bytes_received: Json | None = None
    # Names of instances that it can't exchange KV with; None: not reported, as by other engines.
    refuses: tuple[str, ...] | None = ()
    # What /kv/topology reports besides the engine id; None: there is no such path.
    topology: Json | None = None
    # D, push flow: how often it posts to the metaserver, and the event of free blocks before that.
    num_posts: int = 1
    has_free_blocks: asyncio.Event | None = None

    def take_recomputation(self) -> int | None:
        """After how many events this request is recomputed; the next one may have another value."""
        found = self.recompute_after
        self.recompute_after, self.recompute_again_after = self.recompute_again_after, None
        return found


class FakeInstance:
    """One P or D on loopback. `seen` has its requests, `cut_off` those of gone clients."""

    def __init__(self, name: str = "fake", behaviour: Behaviour | None = None) -> None:
        self.name = name
        self.behaviour = behaviour or Behaviour()
        self.seen: list[ReceivedRequest] = []
        self.cut_off: list[str] = []
        self.released: list[str] = []
        # Ids of the KV that this instance has held for a D since its last start.
        self.holding: list[str] = []
        # Push flow: the D's that P can write to, what P wrote, and events of KV that has arrived.
        self.peers: dict[str, FakeInstance] = {}
        self.written_to: list[Json] = []
        self.arrived: dict[str, asyncio.Event] = {}
        self.metaserver_statuses: list[int] = []
        self.changed = asyncio.Event()
        self._server: asyncio.AbstractServer | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def generated(self) -> list[ReceivedRequest]:
        """Generation requests, without health checks and aborts."""
        return [seen for seen in self.seen if seen.path.startswith("/v1/") and seen.body]

    async def start(self) -> None:
        """Start listening; a second start takes the same port again."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def kill(self) -> None:
        """Die: reset all connections and stop listening."""
        self.holding.clear()
        if self._server is not None:
            self._server.close()
            for writer in tuple(self._writers):
                writer.transport.abort()
            await asyncio.sleep(0)
            self._server = None

    async def wait_for(self, condition: Callable[[], bool], timeout: float = 5.0) -> None:
        """Wait for a condition, which is checked whenever something happens at this instance."""

        async def wait() -> None:
            while not condition():
                self.changed.clear()
                await self.changed.wait()

        await asyncio.wait_for(wait(), timeout)

    # ------------------------------------------------ connections

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while (seen := await _read_request(reader)) is not None:
                self.seen.append(seen)
                self.changed.set()
                await self._answer_watched(seen, reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, _Broken):
            pass
        finally:
            self._writers.discard(writer)
            self.changed.set()
            writer.transport.abort()

    async def _answer_watched(
        self, seen: ReceivedRequest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Answer; if the proxy closes the connection first, the request is aborted."""
        answer = asyncio.ensure_future(self._answer(seen, writer))
        gone = asyncio.ensure_future(_closed(reader))
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            answer.cancel()
            for held in self._held_ids(seen):
                if held in self.holding:  # an aborted request holds no KV, answered or not
                    self.holding.remove(held)
            self.cut_off.append(seen.headers.get("x-request-id", ""))
        gone.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await gone
        try:
            await answer
        except asyncio.CancelledError:
            raise _Broken from None

    def _standing(self) -> Json:
        if self.behaviour.refuses is None:
            return {"refused_peers": "what foreign ones may mean by that"}
        refused = [f"engine-{name}" for name in self.behaviour.refuses]
        health: Json = {"status": "ok", "engine_id": f"engine-{self.name}"}
        health["refused_peers"] = refused
        if (ranks := self.behaviour.dp_ranks) is not None:
            health["data_parallel_size"] = len(ranks)
            rows = [{"running": running, "waiting": waiting} for running, waiting in ranks]
            health["data_parallel_ranks"] = rows if len(rows) > 1 else []
        said = {"kv_pool": self.behaviour.kv_pool, "bytes_received": self.behaviour.bytes_received}
        return health | {name: value for name, value in said.items() if value is not None}

    def _facts(self, seen: ReceivedRequest) -> tuple[int, Json] | None:
        """Answers of the status endpoints: status and body."""
        behaviour = self.behaviour
        if seen.path == "/health":
            is_good = behaviour.health == 200
            return behaviour.health, self._standing() if is_good else behaviour.error
        if seen.path == "/kv/topology":
            if behaviour.topology is None:
                return 404, {"error": "unknown"}
            return 200, {"engine_id": f"engine-{self.name}", **behaviour.topology}
        if seen.path == "/query":  # a bootstrap server of vLLM's Mooncake connector
            return 200, {"0": {"engine_id": f"engine-{self.name}", "worker_addr": {}}}
        return None

    async def _answer(self, seen: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        behaviour = self.behaviour
        if (facts := self._facts(seen)) is not None:
            _respond(writer, *facts)
            return
        if seen.path == "/abort":
            if behaviour.abort_status != 200:
                _respond(writer, behaviour.abort_status, behaviour.error)
                return
            self.released.append(seen.body["request_id"])
            self.changed.set()
            _respond(writer, 200, {})
            return
        if (known := _known_to_all(seen, self.behaviour.tokens)) is not None:
            _respond(writer, *known)
            return
        await self._misbehave(behaviour, writer)
        _check_open(writer)
        if behaviour.status != 200:
            _respond(writer, behaviour.status, behaviour.error, behaviour.headers)
            return
        params = seen.body.get("kv_transfer_params") or {}
        if params.get("metaserver"):
            await self._decode(seen, params["metaserver"])
        if params.get("do_remote_decode") and params.get("remote_port") is not None:
            self.written_to.append(params)
            peer = self.peers[params["remote_engine_id"]]
            peer.arrived.setdefault(params["request_id"], asyncio.Event()).set()
            _respond(writer, 200, self._base(seen, "answer") | {"choices": []})
        elif params.get("do_remote_decode"):
            _respond(writer, 200, self._prefilled(seen))
        elif seen.body.get("stream"):
            await self._stream(seen, params, writer)
        else:
            _respond(writer, 200, self._whole(seen))
        await writer.drain()

    async def _misbehave(self, behaviour: Behaviour, writer: asyncio.StreamWriter) -> None:
        if behaviour.dies and self._server is not None:
            self._server.close()
        if behaviour.drops or behaviour.dies:
            writer.transport.abort()
            raise _Broken
        if behaviour.hangs:
            await asyncio.Event().wait()
        if behaviour.delay_s:
            await asyncio.sleep(behaviour.delay_s)

    async def _decode(self, seen: ReceivedRequest, metaserver: str) -> None:
        """D in the push flow: report where the blocks are, then wait until they are written."""
        request_id = f"cmpl-{seen.headers['x-request-id']}-0"
        body = {
            "token_ids": [],
            "request_id": request_id,
            "do_remote_prefill": False,
            "do_remote_decode": True,
            "remote_block_ids": [[1, 2]],
            "remote_block_size": [16],
            "remote_engine_id": self.name,
            "remote_host": "127.0.0.1",
            "remote_port": 1,
            "remote_tp_size": 1,
            "remote_pcp_size": 1,
            "remote_dcp_size": 1,
            "remote_cached_tokens": 0,
        }
        arrived = self.arrived.setdefault(request_id, asyncio.Event())
        if self.behaviour.has_free_blocks is not None:
            await self.behaviour.has_free_blocks.wait()
        for _ in range(self.behaviour.num_posts):
            self.metaserver_statuses.append(await post_json(metaserver, body))
        await arrived.wait()

    # ------------------------------------------------ answers

    def _base(self, seen: ReceivedRequest, kind: str) -> Json:
        is_chat = seen.path.endswith("chat/completions")
        prefix = "chatcmpl" if is_chat else "cmpl"
        name = {"answer": "chat.completion", "chunk": "chat.completion.chunk"}[kind]
        return {
            "id": f"{prefix}-{seen.headers['x-request-id']}",
            "object": name if is_chat else "text_completion",
            "created": CREATED,
            "model": seen.body.get("model", "m"),
        }

    def _choice(self, seen: ReceivedRequest, index: int, text: str, finish: str | None) -> Json:
        choice: Json = {"index": index, "logprobs": None, "finish_reason": finish}
        if seen.body.get("logprobs"):
            choice["logprobs"] = {"tokens": text.split()}
        if seen.path.endswith("chat/completions"):
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        return choice

    def _prefilled(self, seen: ReceivedRequest) -> Json:
        behaviour = self.behaviour
        at = num_generated_before(seen.body)
        text = word(at) if behaviour.first_text is None else behaviour.first_text
        stops = behaviour.stops_at_first or (behaviour.stops_later_passes and at > 0)
        finish = "stop" if stops else "length"
        count = seen.body.get("n") or 1
        choices = [self._choice(seen, index, text, finish) for index in range(count)]
        answer = self._base(seen, "answer") | {
            "choices": [self._with_ids(seen, c, range(at, at + 1)) for c in choices],
            "usage": {"prompt_tokens": 7, "completion_tokens": count, "total_tokens": 7 + count},
            "kv_transfer_params": None,
        }
        if behaviour.has_params and not stops:
            parts = [self._params(seen, held, at) for held in self._held_ids(seen)]
            several = {"choices": parts} if count > 1 else {}
            answer["kv_transfer_params"] = parts[0] | several
            self.holding += self._held_ids(seen)
        return answer

    def _held_ids(self, seen: ReceivedRequest) -> list[str]:
        """The ids under which a prefill's KV is held, one per choice."""
        held = f"{self.name}:{seen.headers.get('x-request-id', '')}"
        count = seen.body.get("n") or 1
        return [held] if count == 1 else [f"{held}/{index}" for index in range(count)]

    def _with_ids(self, seen: ReceivedRequest, choice: Json, positions: range) -> Json:
        """The choice with its token ids, if the request wants them."""
        if seen.body.get("return_token_ids"):
            prompt = seen.body.get("prompt")
            choice["prompt_token_ids"] = prompt if isinstance(prompt, list) else PROMPT_IDS
            choice["token_ids"] = [token_id(position) for position in positions]
        return choice

    def _params(self, seen: ReceivedRequest, held: str, position: int) -> Json:
        last_token_id = self.behaviour.last_token_id
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.name,
            "remote_request_id": held,
            "remote_host": "127.0.0.1",
            "remote_port": 1,
            "remote_block_ids": [[1, 2]],
            "remote_block_size": 16,
            "remote_ptp_size": 1,
            "remote_pcp_size": 1,
            "remote_dcp_size": 1,
            "remote_multi_nodes_meta_mapping": {},
            "num_prompt_blocks": 2,
            "num_prompt_tokens": 7,
            "last_token_id": token_id(position) if last_token_id is None else last_token_id,
            "created": CREATED,
            "remote_cached_tokens": 3,
            "decode_continues_prompt": self.behaviour.continues_prompt,
        }

    def _whole(self, seen: ReceivedRequest) -> Json:
        num_tokens = seen.body.get("max_tokens") or 16
        count = seen.body.get("n") or 1
        at = num_generated_before(seen.body)
        given_back = self.behaviour.take_recomputation()
        if given_back is not None:
            num_tokens = given_back
        choices = [
            self._choice(seen, index, text_of(at + num_tokens, at), "length")
            for index in range(count)
        ]
        for choice in choices:
            self._with_ids(seen, choice, range(at, at + num_tokens))
            if given_back is not None:
                choice["stop_reason"] = "recomputed"
        usage = _usage(num_tokens * count)
        return self._base(seen, "answer") | {"choices": choices, "usage": usage}

    async def _stream(
        self, seen: ReceivedRequest, params: Json, writer: asyncio.StreamWriter
    ) -> None:
        _check_open(writer)
        writer.write(STREAM_HEAD)
        behaviour = self.behaviour
        for position, data in enumerate(_cut(self._events(seen, params), behaviour.cut)):
            if behaviour.die_after == position and not self._spares(seen):
                await writer.drain()
                writer.transport.abort()
                raise _Broken
            if behaviour.hang_after == position and not self._spares(seen):
                await asyncio.Event().wait()
            if behaviour.token_delay_s:
                await asyncio.sleep(behaviour.token_delay_s)
            _check_open(writer)
            writer.write(b"%x\r\n%b\r\n" % (len(data), data))
            await writer.drain()
        _check_open(writer)
        writer.write(b"0\r\n\r\n")

    def _spares(self, seen: ReceivedRequest) -> bool:
        return self.behaviour.spares_retries and seen.headers["x-request-id"] != "abc"

    def _events(self, seen: ReceivedRequest, params: Json) -> list[bytes]:
        behaviour = self.behaviour
        num_tokens = seen.body.get("max_tokens") or 16
        delivered = params.get("first_token_delivered") and not behaviour.emits_first_token
        at = num_generated_before(seen.body)
        first = at + (1 if delivered else 0)
        is_chat = seen.path.endswith("chat/completions")
        count = seen.body.get("n") or 1
        events = []
        if is_chat and not delivered:
            events.append(self._chunk(seen, 0, {"role": "assistant", "content": ""}, None))
        if delivered and seen.body.get("return_token_ids"):
            repeated = json.loads(self._chunk(seen, 0, word(at), None)[6:])
            repeated["choices"][0]["delta" if is_chat else "text"] = {} if is_chat else ""
            events.append(f"data: {json.dumps(repeated)}\n\n".encode())
        for position in range(first, at + num_tokens):
            if position - first == behaviour.error_after and not self._spares(seen):
                error = {"message": "broke", "type": "x", "code": behaviour.error_code}
                return [*events, b"data: %b\n\n" % json.dumps({"error": error}).encode()]
            if position - first == behaviour.recompute_after:
                behaviour.take_recomputation()
                chunk = json.loads(self._chunk(seen, 0, "", "stop")[6:])
                chunk["choices"][0]["stop_reason"] = "recomputed"
                return [*events, f"data: {json.dumps(chunk)}\n\n".encode(), b"data: [DONE]\n\n"]
            finish = "length" if position == at + num_tokens - 1 else None
            events += [self._chunk(seen, i, word(position), finish) for i in range(count)]
        if (seen.body.get("stream_options") or {}).get("include_usage"):
            counted = _usage(num_tokens * count, at if params.get("first_token_delivered") else 0)
            usage = self._base(seen, "chunk") | {"choices": [], "usage": counted}
            events.append(f"data: {json.dumps(usage)}\n\n".encode())
        return [*events, b"data: [DONE]\n\n"]

    def _chunk(self, seen: ReceivedRequest, index: int, content: Any, finish: str | None) -> bytes:
        choice: Json = {"index": index, "logprobs": None, "finish_reason": finish}
        if seen.path.endswith("chat/completions"):
            choice["delta"] = content if isinstance(content, dict) else {"content": content}
        else:
            choice["text"] = content
        if isinstance(content, str) and content:
            at = int(content.strip()[1:])
            self._with_ids(seen, choice, range(at, at + 1))
        if seen.body.get("logprobs") and isinstance(content, str):
            choice["logprobs"] = {"tokens": content.split()}
        chunk = self._base(seen, "chunk") | {"choices": [choice]}
        return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"


class _Broken(Exception):
    """The connection was broken, by the fake on purpose or by the proxy."""


def _check_open(writer: asyncio.StreamWriter) -> None:
    """uvloop refuses writes to a transport that `kill` has aborted."""
    if writer.is_closing():
        raise _Broken


def _usage(num_tokens: int, num_more: int = 0) -> Json:
    return {
        "prompt_tokens": 7 + num_more,
        "completion_tokens": num_tokens,
        "total_tokens": 7 + num_more + num_tokens,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


def _cut(events: list[bytes], how: str) -> list[bytes]:
    """Network chunks: one event each, two events each, or cut at awkward places."""
    if how == "two":
        return [b"".join(events[i : i + 2]) for i in range(0, len(events), 2)]
    if how == "split":
        whole = b"".join(events)
        return [whole[i : i + 37] for i in range(0, len(whole), 37)]
    return events


async def post_json(url: str, body: Json) -> int:
    """A POST request as D's HTTP client sends it; returns the status."""
    address, _, path = url.removeprefix("http://").partition("/")
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps(body).encode()
    writer.write(
        f"POST /{path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data
    )
    try:
        line = await reader.readline()
    finally:
        writer.transport.abort()
    return int(line.split()[1])


async def _read_request(reader: asyncio.StreamReader) -> ReceivedRequest | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.decode("latin-1").split("\r\n")
    method, path, _ = first.split(" ")
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        if name:
            headers[name.lower()] = value.strip()
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return ReceivedRequest(method, path, headers, json.loads(body) if body else {})


async def _closed(reader: asyncio.StreamReader) -> None:
    """Wait until the other side closes. It must send nothing while an answer is due."""
    while not reader.at_eof():  # noqa: ASYNC110  # a StreamReader has no such event
        await asyncio.sleep(0.002)


def _known_to_all(seen: ReceivedRequest, tokens: list[int] | None) -> tuple[int, Json] | None:
    """Status and body that every instance would answer alike."""
    if seen.path == "/v1/models":
        return 200, {"object": "list", "data": [{"id": "m", "object": "model"}]}
    if seen.path.startswith("/v1/models/"):
        known = seen.path == "/v1/models/m"
        return (200, {"id": "m"}) if known else (404, {"error": "unknown"})
    if seen.path == "/tokenize":
        read = list(seen.body["prompt"].encode()) if tokens is None else tokens
        return 200, {"tokens": read}
    if seen.path == "/tokenizer_info":
        return 200, {"tokenizer_class": "Fake"}
    return None


def _respond(
    writer: asyncio.StreamWriter, status: int, body: Json, headers: dict[str, str] | None = None
) -> None:
    _check_open(writer)
    data = json.dumps(body).encode()
    extra = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
    head = (
        f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n{extra}"
        f"content-length: {len(data)}\r\n\r\n"
    )
    writer.write(head.encode() + data)


# ---------------------------------------------------------------- a proxy in front of them


@dataclass
class FakeDeployment:
    """A proxy with its instances, all in this event loop on real sockets."""

    app: ProxyApplication
    prefills: list[FakeInstance]
    decodes: list[FakeInstance]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.app.port}"

    @property
    def prefill(self) -> FakeInstance:
        return self.prefills[0]

    @property
    def decode(self) -> FakeInstance:
        return self.decodes[0]

    def publish_topologies(self, **facts: Any) -> None:
        """Have all instances report these facts at `/kv/topology`, as ours do and vLLM's don't."""
        pool = self.app.router.pool
        for instance in pool:
            pool.note_topology(instance, PairTopology(f"engine of {instance.name}", **facts))

    def report(self, **facts: Any) -> None:
        """Have all instances report these facts at `/health`."""
        pool = self.app.router.pool
        for instance in pool:
            pool.note_compatibility(instance, Compatibility(f"engine of {instance.name}", **facts))

    def count(self, name: str, *labels: str) -> float:
        """A counter's value."""
        counter = getattr(self.app.router.metrics, name)
        return float(counter.values.get(labels, 0.0))


@asynccontextmanager
async def fake_deployment(
    num_prefills: int = 1, num_decodes: int = 1, num_both: int = 0, **config: Any
) -> AsyncIterator[FakeDeployment]:
    """Start fakes and a proxy in front of them; health checks only if the test configures them."""
    prefills = [FakeInstance(f"p{i}") for i in range(num_prefills)]
    decodes = [FakeInstance(f"d{i}") for i in range(num_decodes + num_both)]
    for prefill in prefills:
        prefill.peers = {decode.name: decode for decode in decodes}
    async with fake_deployment_of(prefills, decodes, num_both=num_both, **config) as running:
        yield running


@asynccontextmanager
async def fake_deployment_of(
    prefills: Sequence[FakeInstance],
    decodes: Sequence[FakeInstance],
    *,
    num_both: int = 0,
    emits_first_token: bool = False,
    recomputes: bool = False,
    **config: Any,
) -> AsyncIterator[FakeDeployment]:
    """Start these fakes, the last ``num_both`` decodes of which also prefill, and a proxy."""
    specs = []
    for position, fake in enumerate((*prefills, *decodes)):
        fake.behaviour.emits_first_token = emits_first_token
        await fake.start()
        if position < len(prefills):
            specs.append(InstanceSpec(Origin.parse(fake.url), Role.PREFILL))
            continue
        role = Role.DECODE if position < len(prefills) + len(decodes) - num_both else Role.BOTH
        specs.append(InstanceSpec(Origin.parse(fake.url), role, emits_first_token, recomputes))
    settings: Json = {
        "port": 0,
        "instances": tuple(specs),
        "health": HealthConfig(interval_s=0),
        "access_log": "off",
        "shutdown_timeout_s": 1.0,
    }
    app = ProxyApplication(ProxyConfig(**(settings | config)))
    await app.start()
    try:
        yield FakeDeployment(app, list(prefills), list(decodes))
    finally:
        await app.close()
        for fake in (*prefills, *decodes):
            await fake.kill()
