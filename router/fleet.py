"""All engines: who they are, what they serve, who may get work."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from router.discovery import Discovery, Resolver, resolve_all
from router.engine import Engine
from router.index import PrefixIndex
from router.live import LiveConfig
from router.policies import Policy, make_policy
from router.settings import RouterSettings
from router.tasks import cancel_quietly
from tandem.errors import TandemError
from tandem.inference.v1 import inference_pb2 as pb

log = logging.getLogger("router.fleet")

TICK_S = 0.1
NO_ENGINE_RETRY_S = 5.0


class Fleet:
    """The engines of this router, by address. Nothing here cannot be rebuilt from the engines themselves."""

    def __init__(self, settings: RouterSettings, token: str = "", resolver: Resolver = resolve_all) -> None:
        self.settings = settings
        self.live = LiveConfig.of(settings)
        self.index = PrefixIndex(settings.index_max_blocks)
        self.policy: Policy = make_policy(settings.policy, self.index, prediction_ttl_s=settings.prediction_ttl_s)
        self.engines: dict[str, Engine] = {}
        self.known_models: dict[str, None] = {}
        self._token = token
        self._discovery = Discovery(settings.engines, settings.resolve_interval_s, resolver)
        self._listeners: list[Callable[[], None]] = []
        self._tickers: list[Callable[[], None]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._closing: set[asyncio.Task[None]] = set()

    def on_change(self, listener: Callable[[], None]) -> None:
        """`listener` is called after every load report and change of state."""
        self._listeners.append(listener)

    def on_tick(self, listener: Callable[[], None]) -> None:
        """`listener` is called about ten times a second."""
        self._tickers.append(listener)

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._discovery.run(self._set)), asyncio.create_task(self._tick())]

    async def close(self) -> None:
        for task in self._tasks:
            await cancel_quietly(task)
        await asyncio.gather(*(engine.close() for engine in self.engines.values()), *self._closing)
        self.engines.clear()

    def set_policy(self, name: str) -> None:
        """Changes the policy; the new one starts with no predictions."""
        policy = make_policy(name, self.index, prediction_ttl_s=self.settings.prediction_ttl_s)
        for engine in self.engines.values():
            policy.add(engine.load)
        self.policy = policy

    def _set(self, addresses: set[str]) -> None:
        for address in sorted(addresses - set(self.engines)):
            engine = Engine(address, self.settings, self.index, lambda: self.policy, self._changed, token=self._token)
            self.engines[address] = engine
            engine.start()
            log.info("engine found", extra={"engine": address})
        for address, engine in self.engines.items():
            engine.delisted = address not in addresses
        self._changed()

    def _changed(self, engine: Engine | None = None) -> None:
        if engine is not None and engine.model is not None:
            self.known_models.setdefault(engine.model.name)
            for alias in engine.model.aliases:
                self.known_models.setdefault(alias)
        for listener in self._listeners:
            listener()

    async def _tick(self) -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            late = max(0.0, now - last - 5 * TICK_S)
            last = now
            self.index.sweep()
            for ticker in self._tickers:
                ticker()
            for engine in list(self.engines.values()):
                engine.check_hung(now, late, self.live.stall_limit_s)
                if engine.delisted and not engine.load.in_flight:
                    # Its name no longer resolves there and nothing runs: forget it.
                    log.info("engine gone", extra={"engine": engine.address})
                    del self.engines[engine.address]
                    task = asyncio.create_task(engine.close())
                    self._closing.add(task)
                    task.add_done_callback(self._closing.discard)

    # -- models

    def serving(self, model: str) -> list[Engine]:
        """Engines that serve this name, in whatever state."""
        return [
            engine
            for engine in self.engines.values()
            if engine.model is not None and (engine.model.name == model or model in engine.model.aliases)
        ]

    def models(self) -> list[pb.ModelInfo]:
        """Models served now by at least one engine that takes requests, one entry per name."""
        now = time.monotonic()
        found: dict[str, pb.ModelInfo] = {}
        for engine in sorted(self.engines.values(), key=lambda engine: engine.address):
            if engine.model is not None and not engine.excluded(now):
                found.setdefault(engine.model.name, engine.model)
        return list(found.values())

    def resolve(self, model: str) -> str:
        """The name that a request means; empty means the only model.

        Raises:
            TandemError: MODEL_NOT_FOUND, or NO_ENGINE if the name was served before (or nothing was served yet).
        """
        served = sorted({info.name for info in self.models()})
        if not model:
            if len(served) == 1:
                return served[0]
            known = {engine.model.name for engine in self.engines.values() if engine.model is not None}
            if not served or len(known) == 1:
                return self._absent(next(iter(known)) if len(known) == 1 else model)
            raise TandemError(
                "INVALID_FIELD",
                f"model is empty, but {len(served)} models are served: {', '.join(served)}",
                field="model",
                value="",
                limit=f"one of {', '.join(served)}",
            )
        now = time.monotonic()
        if any(not engine.excluded(now) for engine in self.serving(model)):
            return model
        return self._absent(model)

    def _absent(self, model: str) -> str:
        served = sorted({info.name for info in self.models()})
        # Before any engine has told what it serves, nobody can say that a name is wrong.
        if model in self.known_models or not self.known_models:
            raise TandemError(
                "NO_ENGINE",
                f"no engine serves {model or 'any model'} now",
                retry_after_s=NO_ENGINE_RETRY_S,
                model=model,
                served=", ".join(served),
            )
        raise TandemError(
            "MODEL_NOT_FOUND",
            f"no model {model!r}; served: {', '.join(served) or 'none'}",
            model=model,
            served=", ".join(served),
        )

    def usable(self, model: str) -> list[Engine]:
        """Engines of this model that may get a request now."""
        now = time.monotonic()
        return [engine for engine in self.serving(model) if not engine.excluded(now)]
