"""The proxy's configuration: complete and validated when constructed, and immutable.

`config_from_options.py` builds it from the command line.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mooncake_api.instance_protocol import is_http_url, is_origin
from mooncake_proxy.api.api_keys import ApiKey
from mooncake_proxy.errors import ConfigError
from mooncake_proxy.http1.http_wire import MAX_PORT, Origin
from mooncake_proxy.http1.server_connection import ServerLimits
from mooncake_proxy.http1.upstream_connection import ClientLimits
from mooncake_proxy.pool.health_checks import HealthConfig
from mooncake_proxy.pool.instances import InstanceSpec, duplicate_names
from mooncake_proxy.pool.membership import InstanceDefaults
from mooncake_proxy.routing.policies import POLICIES

FLOWS = ("pull", "push", "sglang")
ROLE_CHANGES = ("off", "propose", "allow")
ADMISSIONS = ("none", "baseline", "early", "predictive")
# Policies of mooncake-conductor that routing/policies.py does not have. Both have random,
# round-robin and least-loaded, which differ only in the unit of load.
CONDUCTOR_POLICIES = ("cost", "mooncake", "cache-local", "lmetric", "dynamo", "sglang", "preble")
# Policies of the conductor that can be combined with `--admission`.
ADMITTING_POLICIES = ("random", "round-robin", "least-loaded", *CONDUCTOR_POLICIES)
POLICY_CHOICES = (*POLICIES, *CONDUCTOR_POLICIES)


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """The proxy's certificate and key, and how it verifies those of instances. Paths of files."""

    certificate: str | None = None
    key: str | None = None
    upstream_ca: str | None = None
    upstream_verify: bool = True


@dataclass(frozen=True, slots=True)
class KeyFiles:
    """The files that the keys were read from, and their stamps (`ops/reloaded_files.py`) before."""

    api: str | None = None
    admin: str | None = None
    stamps: tuple[tuple[int, ...] | None, ...] = (None, None)


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """How many requests may run and wait, and for how long they may wait.

    `max_running` 0: no bound, and no queue.
    """

    max_running: int = 0
    max_waiting: int = 1024
    max_wait_s: float = 30.0


@dataclass(frozen=True, slots=True)
class RequestClass:
    """Requests with the same objectives: milliseconds, or multiples of the unloaded time ("5x")."""

    name: str
    slo_ttft: str = "inf"
    slo_tbt: str = "inf"
    is_best_effort: bool = False

    @classmethod
    def parse(cls, text: str) -> RequestClass:
        """Parse `NAME:ttft=2000,tbt=5x,best-effort`. Raises ConfigError for anything else."""
        name, _, rest = text.partition(":")
        limits, flags = {}, set()
        for part in filter(None, rest.split(",")):
            key, equals, value = part.partition("=")
            if equals and key in ("ttft", "tbt"):
                limits[key] = value
            else:
                flags.add(part)
        if not name or flags - {"best-effort"}:
            wanted = "NAME:ttft=MS,tbt=MULTIPLEx,best-effort"
            raise ConfigError(f"--request-class {text!r}: wanted {wanted}, as much as applies")
        return cls(name, limits.get("ttft", "inf"), limits.get("tbt", "inf"), bool(flags))


@dataclass(frozen=True, slots=True)
class ConductorConfig:
    """The conductor's assumptions about instances, and how it places and admits requests.

    `costs`: MODEL:DEVICE:NUMBER, from which costs of prefills and steps are estimated until they
    have been measured. `default_class`: the class of requests that name none.
    """

    policy: str = "cost"
    admission: str = "none"
    default_class: RequestClass = field(default_factory=lambda: RequestClass("default"))
    classes: tuple[RequestClass, ...] = ()
    costs: str = "llama-3-8b:A100:1"
    # Overrides of `costs` by model name, if several models are served.
    model_costs: Mapping[str, str] = field(default_factory=dict)
    # The decode instance is chosen again when the prefill is complete.
    binds_late: bool = True
    # Bandwidth of each instance's link in GB/s.
    link_gb_s: float = 12.5
    # Capacity of each instance: tokens of KV, and sequences decoded at the same time.
    kv_tokens: int = 1_000_000
    max_batch: int = 256
    # Whether idle instances switch roles if one role is short: off, propose (log only), allow.
    role_changes: str = "off"
    # URLs of proxies on other hosts that serve the same instances under the same names, and the
    # secret that all of them share.
    peers: tuple[str, ...] = ()
    peer_secret: str = ""

    def of_model(self, model: str) -> ConductorConfig:
        """The configuration of the conductor for one model."""
        return replace(self, costs=self.model_costs.get(model, self.costs))


@dataclass(frozen=True, slots=True)
class ProxyConfig:
    """The complete configuration of a proxy process. Times in seconds."""

    host: str = "127.0.0.1"
    port: int = 8000
    # Port of the live page, metrics and the admin API; None: they are on `port`.
    admin_port: int | None = None
    flow: str = "pull"
    instances: tuple[InstanceSpec, ...] = ()
    prefill_policy: str = "least-loaded"
    decode_policy: str = "least-loaded"
    # Model folders with tokenizers, by model name; the name is empty for instances without one.
    # Only the prefix policy and the conductor's policies read prompts.
    tokenizers: Mapping[str, str] = field(default_factory=dict)
    api_keys: frozenset[str] = frozenset()
    # Entries of a structured keys file: names, limits, classes and models of keys.
    tenants: tuple[ApiKey, ...] = ()
    admin_keys: frozenset[str] = frozenset()
    key_files: KeyFiles = field(default_factory=KeyFiles)
    # Origins of web pages that may use the API in a browser; `*`: all.
    allowed_origins: tuple[str, ...] = ()
    # Clients' smaller (more urgent) `priority` values are raised to this.
    min_priority: int = 0
    # Tenants with different API keys share no prefix cache.
    cache_salt_per_key: bool = False
    # Objectives for the metrics of streams, in seconds; None: no objective.
    slo_ttft_s: float | None = None
    slo_tbt_s: float | None = None
    local_prefill: bool = True
    # Streams whose D is lost or shuts down continue elsewhere, from the tokens so far.
    migrates_streams: bool = False
    # Prompts of at most this many uncached tokens are computed by D; 0: none, None: learnt.
    short_prompt_tokens: int | None = 0
    # Prompts of at least this many uncached tokens are pulled while they are computed; 0: none.
    early_pull_tokens: int = 4096
    max_attempts: int = 3
    retry_ratio: float = 0.2
    retry_reserve: int = 10
    eject_after: int = 3
    request_timeout_s: float = 3600.0
    # Less than the grace period of 30 s that Kubernetes and others have by default.
    shutdown_timeout_s: float = 25.0
    access_log: str = "errors"
    # URL at which decode instances reach this proxy. The push flow and early pulls need it if
    # `host` is a wildcard address.
    advertise_url: str | None = None
    pool_file: str | None = None
    kubernetes: str | None = None
    kubernetes_api: str | None = None
    instance_defaults: InstanceDefaults = field(default_factory=InstanceDefaults)
    # Secret that signs registrations of instances; empty: registration is disabled.
    register_secret: str = ""
    # Where node stores serve their metrics.
    store_metrics: tuple[Origin, ...] = ()
    # URL of an OpenTelemetry collector; None: no tracing.
    otlp_endpoint: str | None = None
    workers: int = 1
    server: ServerLimits = field(default_factory=ServerLimits)
    client: ClientLimits = field(default_factory=ClientLimits)
    health: HealthConfig = field(default_factory=HealthConfig)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    # None: the proxy's own policies choose instances.
    conductor: ConductorConfig | None = None
    tls: TlsConfig = field(default_factory=TlsConfig)

    def __post_init__(self) -> None:
        self._check_choice("--flow", self.flow, FLOWS)
        self._check_choice("--prefill-policy", self.prefill_policy, POLICY_CHOICES)
        self._check_choice("--decode-policy", self.decode_policy, POLICY_CHOICES)
        self._check_conductor()
        self._check_choice("--access-log", self.access_log, ("off", "errors", "all"))
        reads_prompts = "prefix" in (self.prefill_policy, self.decode_policy) or self.conductor
        if self.tokenizers and not reads_prompts:
            raise ConfigError(
                f"--tokenizer {', '.join(self.tokenizers.values())}: only prefix and the "
                "conductor's policies read prompts; add --policy cost, --policy prefix or "
                "--prefill-policy prefix"
            )
        if self.flow == "push" and not self.is_reachable:
            raise ConfigError(
                f"--flow push on --host {self.host}: decode instances must reach the metaserver; "
                "give --advertise-url http://THIS_HOST:PORT"
            )
        self._check_ports()
        self._check_numbers()
        self._check_tenants()
        if self.flow == "sglang" and self.short_prompt_tokens != 0:
            raise ConfigError(
                "--short-prompt-tokens: decode instances of --flow sglang compute no prompts"
            )
        if self.flow == "sglang" and self.migrates_streams:
            raise ConfigError(
                "--migrate-streams: streams of --flow sglang have no token ids to continue from"
            )
        self._check_access()
        if self.otlp_endpoint is not None and not is_http_url(self.otlp_endpoint):
            raise ConfigError(
                f"--otlp-endpoint {self.otlp_endpoint!r}: wanted the URL of a collector such as "
                "http://collector:4318"
            )
        if self.advertise_url is not None and not is_http_url(self.advertise_url):
            raise ConfigError(
                f"--advertise-url {self.advertise_url!r}: wanted where decode instances reach this "
                "proxy, such as http://THIS_HOST:8000"
            )
        if not self.health.path.startswith("/"):
            raise ConfigError(f"--health-path {self.health.path!r}: wanted a path such as /health")
        if twice := duplicate_names(self.instances):
            raise ConfigError(
                f"{twice} given twice: an instance has one role "
                "(--backend-url for one that does both)"
            )

    @property
    def is_reachable(self) -> bool:
        """Whether the address at which decode instances reach this proxy is known."""
        return self.advertise_url is not None or self.host not in ("0.0.0.0", "::", "")

    @property
    def has_metaserver(self) -> bool:
        """Whether decode instances may post to this proxy's metaserver."""
        is_early = self.flow == "pull" and self.early_pull_tokens > 0 and self.is_reachable
        return is_early or self.flow == "push"

    def _check_counts_and_times(self) -> None:
        health, client, waiting = self.health, self.client, self.admission
        for flag, number in (
            ("--max-attempts", self.max_attempts),
            ("--workers", self.workers),
            ("--health-rise", health.rise),
            ("--health-fall", health.fall),
            ("--max-body-bytes", self.server.max_body_bytes),
        ):
            if number < 1:
                raise ConfigError(f"{flag} {number}: wanted 1 or more")
        for flag, value in (
            ("--eject-after", self.eject_after),
            ("--max-running", waiting.max_running),
            ("--max-waiting", waiting.max_waiting),
            ("--max-wait", waiting.max_wait_s),
            ("--retry-ratio", self.retry_ratio),
            ("--health-interval", health.interval_s),
        ):
            if math.isnan(value) or value < 0:
                raise ConfigError(f"{flag} {value:g}: wanted 0 or more")
        for flag, seconds in (
            ("--health-timeout", health.timeout_s),
            ("--request-timeout", self.request_timeout_s),
            ("--connect-timeout", client.connect_timeout_s),
            ("--first-byte-timeout", client.first_byte_timeout_s),
            ("--stall-timeout", client.stall_timeout_s),
        ):
            if math.isnan(seconds) or seconds <= 0:
                raise ConfigError(f"{flag} {seconds:g}: wanted more than 0 seconds")

    def _check_numbers(self) -> None:
        self._check_counts_and_times()
        if not 0.0 <= self.shutdown_timeout_s < math.inf:
            raise ConfigError(f"--shutdown-timeout {self.shutdown_timeout_s:g}: wanted 0 or more")
        if self.short_prompt_tokens is not None and self.short_prompt_tokens < 0:
            raise ConfigError(
                f"--short-prompt-tokens {self.short_prompt_tokens}: wanted 0 or more, or auto"
            )
        if self.early_pull_tokens < 0:
            raise ConfigError(f"--early-pull-tokens {self.early_pull_tokens}: wanted 0 or more")
        for flag, limit in (("--slo-ttft", self.slo_ttft_s), ("--slo-tbt", self.slo_tbt_s)):
            if limit is not None and not 0.0 < limit < math.inf:
                raise ConfigError(f"{flag} {1000 * limit:g}: wanted more than 0 ms")

    def _check_conductor(self) -> None:
        """Check the conductor's settings. Its policies choose both instances of a request."""
        policies = (self.prefill_policy, self.decode_policy)
        chosen = [name for name in policies if name in CONDUCTOR_POLICIES]
        if chosen and policies != (chosen[0],) * 2:
            raise ConfigError(
                f"--prefill-policy {policies[0]}, --decode-policy {policies[1]}: {chosen[0]} "
                f"chooses both instances together; give --policy {chosen[0]}"
            )
        if chosen and self.conductor is None:
            raise ConfigError(f"--policy {chosen[0]}: wanted the settings of the conductor")
        if self.conductor is not None:
            self._check_capacities(self.conductor)
            self._check_choice("--admission", self.conductor.admission, ADMISSIONS)
            self._check_choice("--role-changes", self.conductor.role_changes, ROLE_CHANGES)
            if self.conductor.role_changes != "off" and self.slo_ttft_s is None:
                raise ConfigError(
                    f"--role-changes {self.conductor.role_changes}: wanted --slo-ttft in "
                    "milliseconds, which the load of prefill instances is measured by"
                )
            if self.conductor.role_changes == "allow" and self.flow == "sglang":
                raise ConfigError(
                    "--role-changes allow: an instance of --flow sglang has the role that its "
                    "--disaggregation-mode gives it; wanted propose"
                )
            if bool(self.conductor.peers) is not bool(self.conductor.peer_secret):
                raise ConfigError(
                    "--peer-proxy and --peer-secret-file go together: the proxies to share "
                    "reservations with, and the secret that all of them have"
                )
            if self.conductor.policy not in ADMITTING_POLICIES:
                raise ConfigError(
                    f"--policy {self.conductor.policy} does not go together with --admission: "
                    f"wanted one of {', '.join(ADMITTING_POLICIES)}"
                )

    @staticmethod
    def _check_capacities(conductor: ConductorConfig) -> None:
        """Check what the conductor assumes of each instance."""
        for flag, number in (
            ("--kv-tokens", conductor.kv_tokens),
            ("--max-batch", conductor.max_batch),
        ):
            if number < 1:
                raise ConfigError(f"{flag} {number}: wanted 1 or more")
        if not 0.0 < conductor.link_gb_s < math.inf:
            raise ConfigError(f"--link-gb-s {conductor.link_gb_s:g}: wanted more than 0 GB/s")

    def _check_access(self) -> None:
        if self.tls.key is not None and self.tls.certificate is None:
            raise ConfigError(f"--tls-key {self.tls.key}: wanted --tls-cert as well")
        if self.cache_salt_per_key and not self.api_keys:
            raise ConfigError("--cache-salt-per-key: wanted --api-key-file as well")
        for origin in self.allowed_origins:
            if not is_origin(origin):
                raise ConfigError(
                    f"--allowed-origins {origin!r}: wanted * or the origin of web pages, such as "
                    "https://chat.example.com"
                )

    def _check_tenants(self) -> None:
        """Check that the classes that keys name exist, which requires the conductor."""
        known = {each.name for each in self.conductor.classes} if self.conductor else set()
        for tenant in self.tenants:
            if unknown := [name for name in tenant.classes if name not in known]:
                raise ConfigError(
                    f"key {tenant.name!r}: no class {', '.join(unknown)}; there are "
                    f"{', '.join(sorted(known)) or 'none'} (classes of the keys file, "
                    "--request-class, with --admission or a policy of the conductor)"
                )

    def _check_ports(self) -> None:
        for flag, port in (("--port", self.port), ("--admin-port", self.admin_port or 0)):
            if not 0 <= port <= MAX_PORT:
                raise ConfigError(f"{flag} {port}: wanted 0 to {MAX_PORT}")
        if self.admin_port and self.admin_port == self.port:
            raise ConfigError(
                f"--admin-port {self.admin_port}: wanted another one than --port, which serves the "
                "admin paths, too, where --admin-port is not given"
            )
        if self.workers > 1 and self.admin_port == 0:
            raise ConfigError("--admin-port 0: with several workers wanted a port that all share")

    @staticmethod
    def _check_choice(flag: str, value: str, allowed: tuple[str, ...]) -> None:
        if value not in allowed:
            raise ConfigError(f"{flag} {value!r}: wanted one of {', '.join(allowed)}")
