"""Replicas of `warpsmith serve` behind one address, as an application of Ray Serve.

    serve run serve.yaml

Each replica starts a server of its own and hands requests on to it. A request goes to the replica that has the
beginning of its prompt in its cache, unless that one has much more to do than another. See docs/scaling.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from child import Child
from prefixes import Prefixes, blocks_of, choose
from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from ray.util.metrics import Gauge
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

logger = logging.getLogger("ray.serve")

# Headers that belong to one connection, and what the two sides say about themselves anew.
HOP = {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding"}
DROPPED = HOP | {"upgrade", "host", "content-length", "date", "server"}
# Routes that are about one server, which this address cannot name.
OF_ONE_SERVER = ("/", "/debug/state", "/flush_cache", "/metrics", "/server_info")
# Seconds after which a request that was not sent counts no more.
CHOSEN_FOR = 5.0


class Arguments(BaseModel):
    """The `args` of the application, in serve.yaml."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = Field(None, description="the model, as `warpsmith serve MODEL`; without one the default model")
    served_model_name: str = Field("default", description="its name in requests: the same for all replicas")
    program: str = Field("warpsmith", description="the program, in the PATH of each node or with its path")
    flags: list[str] = Field([], description="further words for `warpsmith serve`")
    api_keys: list[str] = Field([], description="keys that requests must have")
    replicas: int = Field(1, ge=1)
    gpus: float = Field(0, ge=0, description="GPUs of a replica")
    cpus: float = Field(1, ge=0, description="CPU cores of a replica")
    ingresses: int = Field(
        1, ge=1, description="processes that take requests; each learns by itself where prefixes are"
    )
    max_ongoing_requests: int = Field(320, ge=1, description="of a replica: as many as may run and wait in its server")
    max_body_bytes: int = Field(2 << 20, ge=1)
    imbalance: int = Field(16, ge=0, description="requests more than another replica that a prefix is worth")
    start_timeout: float = Field(600, gt=0, description="seconds until a replica must be ready")


@dataclass
class Call:
    """A request on its way to a replica."""

    method: str
    path: str
    query: str
    headers: list[tuple[str, str]]
    body: bytes
    # What the router goes by: made once, where the request comes in.
    blocks: list[bytes] = field(default_factory=list)


class PrefixRouter(RequestRouter):
    """Sends a request where its prefix is cached."""

    def initialize_state(self, imbalance: int = 16) -> None:  # type: ignore[override]
        self._imbalance = imbalance
        self._prefixes = Prefixes()
        # Requests that this router has sent to each replica and that have not ended, by their names: Ray also says that
        # those have ended which a replica refused, or which it never reached.
        self._open: dict[str, set[str]] = {}
        # Where requests will go that were not sent yet, and since when: those that come at the same time count too.
        self._chosen: dict[str, tuple[str, float]] = {}

    def _load(self, replica: str) -> int:
        return len(self._open.get(replica, ())) + sum(name == replica for name, _ in self._chosen.values())

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        names = {str(replica.replica_id) for replica in replicas}
        for gone in set(self._open) - names:
            del self._open[gone]
            self._prefixes.forget(gone)
        for name in names:
            self._open.setdefault(name, set())

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        by_name = {str(replica.replica_id): replica for replica in candidate_replicas}
        blocks = self._blocks(pending_request)
        request = pending_request.metadata.internal_request_id if pending_request else ""
        # Some were given up before they were sent.
        now = time.monotonic()
        self._chosen = {
            other: (name, since)
            for other, (name, since) in self._chosen.items()
            if other != request and now - since < CHOSEN_FOR
        }
        matches = self._prefixes.matches(blocks, by_name)
        names = choose(matches, self._load, self._prefixes.size, self._imbalance)
        if names and request:
            self._chosen[request] = (names[0], now)
            self._prefixes.add(blocks, names[0])
        # Ray asks the ranks one after the other: a replica that takes no more requests is passed over.
        return [[by_name[name]] for name in names]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        name, request = str(replica_id), pending_request.metadata.internal_request_id
        self._chosen.pop(request, None)
        self._open.setdefault(name, set()).add(request)
        self._prefixes.add(self._blocks(pending_request), name)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._open.get(str(replica_id), set()).discard(internal_request_id)

    @staticmethod
    def _blocks(pending_request: PendingRequest | None) -> list[bytes]:
        call = pending_request.args[0] if pending_request and pending_request.args else None
        # Ray may have sent the class of the call along: then it is another than this module's.
        blocks: list[bytes] = getattr(call, "blocks", [])
        return blocks


@serve.deployment
class Replica:
    """One server."""

    def __init__(self, arguments: Arguments) -> None:
        model = [arguments.model] if arguments.model else []
        flags = [*model, "--served-model-name", arguments.served_model_name, *arguments.flags]
        flags += ["--max-body-bytes", str(arguments.max_body_bytes)]
        self._child = Child(arguments.program, flags, arguments.api_keys)
        self._child.wait_until_ready(arguments.start_timeout)
        self._name = serve.get_replica_context().replica_id.unique_id
        self._session: aiohttp.ClientSession | None = None
        words = {
            "num_requests_running": "Outputs that are being generated",
            "num_requests_waiting": "Outputs that wait",
        }
        words["kv_cache_usage_perc"] = "The part of the pages of keys and values in use, from 0 to 1"
        self._gauges = {name: Gauge(f"warpsmith_{name}", told, ("replica",)) for name, told in words.items()}

    async def check_health(self) -> None:
        """Ray replaces a replica for which this fails."""
        if trouble := await asyncio.to_thread(self._child.trouble):
            raise RuntimeError(trouble)

    async def record_routing_stats(self) -> dict[str, float]:
        """Hands the server's gauges to Ray's metrics, every now and then."""
        try:
            figures = await asyncio.to_thread(self._child.figures)
        except OSError:
            return {}  # its health says why
        for name, value in figures.items():
            if name in self._gauges:
                self._gauges[name].set(value, {"replica": self._name})
        return figures

    async def call(self, call: Call) -> AsyncGenerator[Any, None]:
        """The answer: first its status and headers, then its parts as they come."""
        if self._session is None:
            # Without limits of its own: those of the server hold.
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
                connector=aiohttp.TCPConnector(limit=0),
                auto_decompress=False,
            )
        url = self._child.url + call.path + (f"?{call.query}" if call.query else "")
        # Leaving this block closes the connection, and so ends the request in the server: also if the client has gone.
        async with self._session.request(
            call.method, url, headers=call.headers, data=call.body, allow_redirects=False
        ) as answer:
            headers = [(name, value) for name, value in answer.headers.items() if name.lower() not in DROPPED]
            yield answer.status, [*headers, ("x-warpsmith-replica", self._name)]
            async for part in answer.content.iter_any():
                yield part

    def __del__(self) -> None:
        child: Child | None = getattr(self, "_child", None)
        if child:
            child.close()


def refused(status: int, kind: str, message: str, **headers: str) -> Response:
    """An error as the API has them."""
    body = {"error": {"message": message, "type": kind, "param": None, "code": None}}
    return JSONResponse(body, status, headers={name.replace("_", "-"): value for name, value in headers.items()})


@serve.deployment
class Ingress:
    """The address."""

    def __init__(self, replicas: DeploymentHandle, max_body_bytes: int) -> None:
        self._replicas = replicas.options(stream=True)
        self._max_body = max_body_bytes

    async def __call__(self, request: Request) -> Response:
        path = request.url.path
        if path in OF_ONE_SERVER:
            told = f"`{path}` is about one server, and there are several here; Ray's metrics have the figures of all"
            return refused(404, "invalid_request_error", told)
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > self._max_body:
                told = f"the body is longer than {self._max_body} bytes"
                return refused(413, "invalid_request_error", told)
        headers = [(name, value) for name, value in request.headers.items() if name.lower() not in DROPPED]
        blocks = blocks_of(bytes(body), request.headers.get("authorization", ""))
        call = Call(request.method, path, request.url.query, headers, bytes(body), blocks)
        parts = self._replicas.call.remote(call)
        try:
            status, answered = await anext(parts)
        except BackPressureError:
            told = "too many requests are waiting; try again later"
            return refused(429, "rate_limit_error", told, retry_after="1")
        except Exception:
            # The replica has ended, or its server has.
            logger.exception("a request was not answered")
            return refused(503, "service_unavailable_error", "the replica has failed; try again", retry_after="1")
        response = StreamingResponse(handed_on(parts), status)
        response.raw_headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in answered]
        return response


async def handed_on(parts: Any) -> AsyncIterator[bytes]:
    """The parts of an answer. If the client goes, so does the request."""
    try:
        async for part in parts:
            yield part
    finally:
        with contextlib.suppress(Exception):
            parts.cancel()


def app(arguments: Arguments) -> serve.Application:
    """What serve.yaml names."""
    # The file is imported by its name on each node: `serve.yaml` says where it lies.
    router = RequestRouterConfig(
        request_router_class="warpsmith_ray:PrefixRouter",
        request_router_kwargs={"imbalance": arguments.imbalance},
    )
    replicas = Replica.options(
        num_replicas=arguments.replicas,
        max_ongoing_requests=arguments.max_ongoing_requests,
        ray_actor_options={"num_cpus": arguments.cpus, "num_gpus": arguments.gpus},
        health_check_period_s=5,
        health_check_timeout_s=15,
        graceful_shutdown_timeout_s=40,
        request_router_config=router,
    ).bind(arguments)
    ingress = Ingress.options(
        num_replicas=arguments.ingresses,
        max_ongoing_requests=arguments.max_ongoing_requests * arguments.replicas,
        ray_actor_options={"num_cpus": 0},
    )
    return ingress.bind(replicas, arguments.max_body_bytes)
