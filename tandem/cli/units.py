"""systemd units of one machine's stack: target, gateway, router, engines, their drafts, and a health timer.

`deploy/systemd/` holds what these functions make for /opt/tandem/bin/tandem and one engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath

HEADER = "# Made by `tandem systemd install`. Change it with a drop-in: systemctl edit NAME\n"

# Beyond what a service asks for by itself. Left out: MemoryDenyWriteExecute (torch and Triton compile at run time) and
# ProcSubset=pid (memory and cores are read from /proc).
_EVERYWHERE = (
    "NoNewPrivileges=yes",
    "LockPersonality=yes",
    "RestrictRealtime=yes",
    "RestrictNamespaces=yes",
    "RestrictSUIDSGID=yes",
    "SystemCallArchitectures=native",
    "SystemCallFilter=@system-service",
    "SystemCallErrorNumber=EPERM",
    "UMask=0077",
)
# These need the system's manager.
_SYSTEM_ONLY = (
    # All units share one user, who exists while one of them runs and owns nothing but cache and sockets.
    "DynamicUser=yes",
    "User=tandem",
    "CapabilityBoundingSet=",
    "AmbientCapabilities=",
    "ProtectSystem=strict",
    "ProtectHome=read-only",
    "ProtectProc=invisible",
    "ProtectKernelTunables=yes",
    "ProtectKernelModules=yes",
    "ProtectKernelLogs=yes",
    "ProtectControlGroups=yes",
    "ProtectClock=yes",
    "ProtectHostname=yes",
    "PrivateTmp=yes",
    "RemoveIPC=yes",
)


@dataclass(frozen=True)
class Plan:
    """What the units are made for. program: the tandem command, absolute; user: for a user's own manager."""

    program: str
    engines: int = 1
    port: int = 8000
    user: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError with the offending value."""
        if not PurePosixPath(self.program).is_absolute() or any(sign in self.program for sign in " %$\"'\\\n"):
            raise ValueError(
                f"the program is {self.program!r}, but must be an absolute path without blanks, quotes or %"
            )
        if not 1 <= self.engines <= 64:
            raise ValueError(f"engines is {self.engines}, but must be from 1 to 64")
        if not 1 <= self.port <= 65535:
            raise ValueError(f"port is {self.port}, but must be from 1 to 65535")


def units(plan: Plan) -> dict[str, str]:
    """File name → text."""
    made = {
        "tandem.target": _target(plan),
        "tandem-gateway.service": _gateway(plan),
        "tandem-router.service": _router(plan),
        "tandem-engine@.service": _engine(plan),
        "tandem-draft@.service": _draft(plan),
        "tandem-health.service": _health(plan),
        "tandem-health.timer": _timer(),
    }
    return {name: HEADER + text for name, text in made.items()}


def _section(name: str, *lines: str) -> str:
    return "\n".join((f"[{name}]", *lines)) + "\n"


def _target(plan: Plan) -> str:
    engines = " ".join(f"tandem-engine@{index}.service" for index in range(plan.engines))
    return "\n".join(
        (
            _section(
                "Unit",
                "Description=Tandem LLM server",
                f"Wants=tandem-gateway.service tandem-router.service {engines} tandem-health.timer",
            ),
            _section("Install", f"WantedBy={'default.target' if plan.user else 'multi-user.target'}"),
        )
    )


def _service(
    plan: Plan, name: str, title: str, relations: tuple[str, ...], command: str, environment: str, *own: str
) -> str:
    """own: lines of this service alone; what they set again comes last and wins."""
    unit = (
        f"Description=Tandem {title}",
        "PartOf=tandem.target",
        *relations,
        # A service that cannot start stays failed after ten tries in five minutes.
        "StartLimitIntervalSec=300",
        "StartLimitBurst=10",
    )
    service = (
        "Type=exec",
        f"ExecStart={plan.program} {command}",
        "EnvironmentFile=-%E/tandem/tandem.env",
        f"EnvironmentFile=-%E/tandem/{environment}.env",
        "Environment=TANDEM_CACHE_DIR=%C/tandem PYTHONUNBUFFERED=1",
        *(() if plan.user else ("Environment=HOME=%C/tandem", "WorkingDirectory=%C/tandem")),
        "CacheDirectory=tandem",
        # One folder for all sockets: no unit may take it away from the others.
        "RuntimeDirectory=tandem",
        "RuntimeDirectoryMode=0700",
        "RuntimeDirectoryPreserve=yes",
        "Restart=on-failure",
        "RestartSec=1",
        # 2: settings that will not get better by trying again.
        "RestartPreventExitStatus=2",
        "KillMode=mixed",
        # The services finish requests for 30 s by default.
        "TimeoutStopSec=45",
        f"SyslogIdentifier=tandem-{name}",
        f"LogExtraFields=TANDEM_SERVICE={name}",
        "LimitNOFILE=65536",
        "TasksMax=4096",
        *_EVERYWHERE,
        *(() if plan.user else _SYSTEM_ONLY),
        *own,
    )
    return "\n".join((_section("Unit", *unit), _section("Service", *service)))


_INTERNET = "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK"


def _no_devices(plan: Plan) -> tuple[str, ...]:
    return () if plan.user else ("PrivateDevices=yes",)


def _gateway(plan: Plan) -> str:
    command = f"gateway --port {plan.port} --router unix:%t/tandem/router.sock"
    command += " --router-admin unix:%t/tandem/router-admin.sock"
    relations = ("Wants=tandem-router.service", "After=tandem-router.service network.target")
    own = (_INTERNET, "CPUWeight=200", "MemoryMax=2G", *_no_devices(plan))
    return _service(plan, "gateway", "gateway (HTTP)", relations, command, "gateway", *own)


def _router(plan: Plan) -> str:
    engines = ",".join(f"unix:%t/tandem/engine-{index}.sock" for index in range(plan.engines))
    command = "router --listen unix:%t/tandem/router.sock --admin-listen unix:%t/tandem/router-admin.sock"
    # It waits for engines by itself, so none is ordered before it.
    relations = ("After=network.target",)
    own = (_INTERNET, "CPUWeight=200", "MemoryMax=4G", *_no_devices(plan))
    return _service(plan, "router", "router", relations, f"{command} --engines {engines}", "router", *own)


def _engine(plan: Plan) -> str:
    command = "engine --engine-name engine-%i --listen unix:%t/tandem/engine-%i.sock"
    command += " --draft unix:%t/tandem/draft-%i.sock"
    relations: tuple[str, ...] = (
        "Wants=tandem-draft@%i.service",
        "After=tandem-draft@%i.service network-online.target",
    )
    relations += () if plan.user else ("Wants=network-online.target",)
    # GPUs by name of their driver; a name that this machine does not know is passed over.
    devices = ("DevicePolicy=closed", *(f"DeviceAllow={name} rw" for name in _GPU_DRIVERS))
    own = (_INTERNET, "CPUWeight=100", "MemoryMax=90%", "OOMScoreAdjust=200", *(() if plan.user else devices))
    return _service(plan, "engine", "engine %i", relations, command, "engine-%i", *own)


_GPU_DRIVERS = ("char-nvidia", "char-nvidia-frontend", "char-nvidia-uvm", "char-nvidia-caps", "char-drm", "char-kfd")


def _draft(plan: Plan) -> str:
    command = "draft --listen unix:%t/tandem/draft-%i.sock"
    # Its socket is all that it needs; a model is fetched by the engine or by `tandem models pull`.
    network = () if plan.user else ("PrivateNetwork=yes",)
    own = ("RestrictAddressFamilies=AF_UNIX", "CPUWeight=200", "MemoryMax=2G", *network, *_no_devices(plan))
    return _service(plan, "draft", "draft of engine %i", (), command, "draft-%i", *own)


def _health(plan: Plan) -> str:
    system = () if plan.user else ("DynamicUser=yes", "CapabilityBoundingSet=", "ProtectSystem=strict")
    return "\n".join(
        (
            # It fails where the stack does not serve: `systemctl --failed` shows it, OnFailure= in a drop-in tells you.
            _section("Unit", "Description=Tandem: can an engine serve?", "After=tandem-gateway.service"),
            _section(
                "Service",
                "Type=oneshot",
                f"ExecStart={plan.program} health http://127.0.0.1:{plan.port} --ready",
                "TimeoutStartSec=30",
                *_EVERYWHERE,
                _INTERNET,
                *system,
            ),
        )
    )


def _timer() -> str:
    return "\n".join(
        (
            _section("Unit", "Description=Tandem: asks every minute who can serve", "PartOf=tandem.target"),
            _section("Timer", "OnActiveSec=5min", "OnUnitActiveSec=1min", "AccuracySec=5s"),
        )
    )
