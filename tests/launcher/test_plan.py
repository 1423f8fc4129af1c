from __future__ import annotations

from pathlib import Path

import pytest

from tandem.cli.flags import Flag
from tandem.launcher.passing import MANAGED, serve_flags, split, to_arguments
from tandem.launcher.plan import ChildSpec, ModelPlace, Plan, child_environment, make_plan, proposer_flags
from tandem.launcher.settings import ServeSettings
from tandem.settings import SettingsError

MODEL = ModelPlace(Path("/models/small.gguf"), "small")
RUN_DIR = Path("/tmp/tandem-test")


def plan(
    env: dict[str, str] | None = None, config: Path | None = None, cores: int = 4, **flags: object
) -> tuple[Plan, dict[str, ChildSpec]]:
    own, passed = split(flags)
    settings = ServeSettings(**own)
    made = make_plan(settings, passed, MODEL, RUN_DIR, config, env or {}, cores)
    return made, {child.name: child for child in made.children}


def test_each_engine_has_its_own_draft_and_all_addresses_are_sockets() -> None:
    _, children = plan(engines=2, port=9000)
    assert set(children) == {"gateway", "router", "engine-0", "engine-1", "draft-0", "draft-1"}
    for index in (0, 1):
        engine = children[f"engine-{index}"]
        assert f"--draft={children[f'draft-{index}'].address}" in engine.arguments
        assert f"--listen={engine.address}" in engine.arguments
        assert engine.address.startswith(f"unix:{RUN_DIR}/")
    assert f"--engines=unix:{RUN_DIR}/engine-0.sock,unix:{RUN_DIR}/engine-1.sock" in children["router"].arguments
    assert "--port=9000" in children["gateway"].arguments
    assert children["gateway"].address == "http://127.0.0.1:9000"


def test_metrics_get_a_port_each_or_none() -> None:
    _, children = plan(engines=2, metrics_port=9100)
    ports = [
        next(word.rpartition(":")[2] for word in children[name].arguments if word.startswith("--metrics-listen="))
        for name in ("engine-0", "engine-1", "draft-0", "draft-1")
    ]
    assert ports == ["9101", "9102", "9103", "9104"]
    assert "--metrics-port=9100" in children["router"].arguments
    # One variable for all of them would be one port for all of them.
    _, children = plan(engines=2, env={"TANDEM_METRICS_LISTEN": "127.0.0.1:9100"})
    assert all("--metrics-listen=" in children[name].arguments for name in ("engine-0", "engine-1", "draft-0"))
    assert "--metrics-port=0" in children["router"].arguments


def test_without_a_draft_engines_are_told_so() -> None:
    _, children = plan(draft="none")
    assert set(children) == {"gateway", "router", "engine-0"}
    assert {"--draft=", "--head=none"} <= set(children["engine-0"].arguments)
    _, drafting = plan()
    assert "--head=none" not in drafting["engine-0"].arguments


def test_cores_are_shared_by_the_engines_unless_threads_are_given() -> None:
    made, children = plan(engines=2, cores=8)
    assert made.threads == 4
    assert "--threads=4" in children["engine-1"].arguments
    made, children = plan(engines=2, cores=8, threads="3")
    assert made.threads == 3
    assert "--threads=3" in children["engine-0"].arguments
    made, children = plan(engines=2, cores=8, env={"TANDEM_THREADS": "5"})
    assert not any(word.startswith("--threads") for word in children["engine-0"].arguments)
    assert made.environment["TANDEM_THREADS"] == "5"
    assert made.threads == 5


def test_a_served_name_that_the_user_set_anywhere_is_kept(tmp_path: Path) -> None:
    _, children = plan()
    assert "--served-model-name=small" in children["engine-0"].arguments
    _, children = plan(env={"TANDEM_SERVED_MODEL_NAME": "mine"})
    assert not any(word.startswith("--served-model-name") for word in children["engine-0"].arguments)
    config = tmp_path / "tandem.toml"
    config.write_text('[engine]\nserved-model-name = "mine"\n')
    _, children = plan(config=config)
    assert not any(word.startswith("--served-model-name") for word in children["engine-0"].arguments)
    assert f"--config={config}" in children["engine-0"].arguments


def test_variables_that_mean_something_else_to_children_are_hidden() -> None:
    env = {"TANDEM_MODEL": "x", "TANDEM_DRAFT": "none", "TANDEM_ENGINES": "2", "TANDEM_LOG_LEVEL": "debug", "HOME": "/"}
    assert child_environment(env) == {"TANDEM_LOG_LEVEL": "debug", "HOME": "/"}


def test_flags_of_services_are_passed_on() -> None:
    _, children = plan(block_size="32", policy="round_robin", log_level="warning")
    assert "--block-size=32" in children["engine-0"].arguments
    assert "--policy=round_robin" in children["router"].arguments
    assert not any(word.startswith("--policy") for word in children["gateway"].arguments)
    for child in children.values():
        assert "--log-level=warning" in child.arguments


def test_one_flag_or_variable_traces_all_services() -> None:
    _, children = plan(otlp_endpoint="http://127.0.0.1:4317", trace_sample_ratio=0.5)
    assert {child.service for child in children.values()} == {"gateway", "router", "engine", "draft"}
    for child in children.values():
        assert {"--otlp-endpoint=http://127.0.0.1:4317", "--trace-sample-ratio=0.5"} <= set(child.arguments), child.name
    made, _ = plan(env={"TANDEM_OTLP_ENDPOINT": "http://127.0.0.1:4317"})
    assert made.environment["TANDEM_OTLP_ENDPOINT"] == "http://127.0.0.1:4317"
    with pytest.raises(SettingsError, match="--otlp-endpoint"):
        plan(env={"TANDEM_OTLP_ENDPOINT": "127.0.0.1:4317"})


def test_settings_that_a_service_would_refuse_are_refused_before_anything_starts() -> None:
    with pytest.raises(SettingsError, match="policy"):
        plan(policy="dice")
    with pytest.raises(SettingsError, match="--block-size"):
        plan(env={"TANDEM_BLOCK_SIZE": "many"})


def test_a_run_dir_too_long_for_sockets_is_refused_with_its_length() -> None:
    own, passed = split({})
    with pytest.raises(ValueError, match="over the limit of 103"):
        make_plan(ServeSettings(**own), passed, MODEL, Path("/tmp/" + "x" * 110), None, {}, 2)


def test_engines_are_spread_over_the_nodes_that_hold_their_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def nodes(threads: int) -> dict[int, set[int]]:
        return {0: set(range(4)), 2: set(range(4, 8))} if threads <= 4 else {}

    monkeypatch.setattr("tandem.launcher.plan.numa_nodes", nodes)
    _, children = plan(engines=3, cores=8)
    found = [[word for word in children[f"engine-{i}"].arguments if word.startswith("--numa-node")] for i in range(3)]
    assert found == [["--numa-node=0"], ["--numa-node=2"], ["--numa-node=0"]]
    _, children = plan(engines=1, cores=8)
    assert not any("numa" in word for word in children["engine-0"].arguments)
    _, children = plan(engines=2, cores=8, env={"TANDEM_NUMA_NODE": "2"})
    assert not any("numa" in word for word in children["engine-0"].arguments)


def test_draft_takes_proposers_or_a_model() -> None:
    assert proposer_flags("auto") == {}
    assert proposer_flags("ngram,suffix") == {"proposers": "ngram,suffix"}
    assert proposer_flags("/models/tiny") == {"proposers": "model", "model": "/models/tiny"}


def test_every_flag_of_serve_is_there_once_and_none_is_the_launchers_own() -> None:
    flags: list[Flag] = serve_flags()
    names = [flag.name for flag in flags]
    assert len(names) == len(set(names))
    own = set(ServeSettings.model_fields)
    passed_on = set(names) - own
    assert "listen" not in passed_on
    assert "max_num_seqs" in passed_on
    assert all("listen" in MANAGED[service] for service in ("router", "engine", "draft"))


def test_booleans_become_flags_without_a_value() -> None:
    assert to_arguments("gateway", {"share_cache": True}) == ["--share-cache"]
    assert to_arguments("gateway", {"share_cache": False}) == ["--no-share-cache"]
