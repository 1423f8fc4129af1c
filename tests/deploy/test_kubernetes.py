"""The Kubernetes manifests: rendered, checked against Kubernetes' own schemas, and against the services' settings."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import promql_parser as promql
import pytest
import yaml

from engine_service.process import LIVE
from router.discovery import parse_engines
from tandem.cli.services import SERVICES
from tandem.settings import Settings, env_name, load_settings
from tests.deploy.metric_names import all_jobs

FOLDER = Path(__file__).resolve().parents[2] / "deploy/kubernetes"
OVERLAYS = ("base", "gpu", "autoscaling")
KUBERNETES = "1.31"
KUSTOMIZE = [["kubectl", "kustomize"], ["kustomize", "build"]]
TOOL = next((command for command in KUSTOMIZE if shutil.which(command[0])), None)
needs_kustomize = pytest.mark.skipif(TOOL is None, reason="neither kubectl nor kustomize is here")


def from_files() -> list[dict[str, Any]]:
    """The base as its files have it, for machines without kustomize."""
    names = yaml.safe_load((FOLDER / "base/kustomization.yaml").read_text())["resources"]
    return [dict(item) for name in names for item in yaml.safe_load_all((FOLDER / "base" / name).read_text())]


@cache
def rendered(overlay: str) -> tuple[dict[str, Any], ...]:
    assert TOOL is not None
    done = subprocess.run([*TOOL, str(FOLDER / overlay)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return tuple(yaml.safe_load_all(done.stdout))


def named(objects: Any, kind: str, name: str) -> dict[str, Any]:
    (found,) = [item for item in objects if item["kind"] == kind and item["metadata"]["name"] == name]
    return dict(found)


BASE = from_files()
WORKLOADS = [item for item in BASE if item["kind"] in ("Deployment", "StatefulSet")]
PODS = {item["metadata"]["name"]: item["spec"]["template"]["spec"] for item in WORKLOADS}
CONTAINERS = {
    container["name"]: container
    for pod in PODS.values()
    for container in [*pod.get("initContainers", []), *pod["containers"]]
}
OURS = ("gateway", "router", "engine", "draft")


def settings_of(container: dict[str, Any]) -> Settings:
    """What the service makes of its arguments and environment."""
    service, *words = container["args"]
    flags = {}
    for word in words:
        flag, equals, value = word.partition("=")
        assert flag.startswith("--") and equals, word
        flags[flag[2:].replace("-", "_")] = value
    env = {entry["name"]: entry.get("value", "x") for entry in container.get("env", [])}
    config = yaml.safe_load((FOLDER / "base/kustomization.yaml").read_text())["configMapGenerator"][0]
    env |= dict(literal.split("=", 1) for literal in config["literals"])
    cls = SERVICES[service].settings()
    for name in env:
        assert name in map(env_name, cls.model_fields), name
    return load_settings(cls, flags=flags, env=env)[0]


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


@needs_kustomize
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_rendered_objects_are_what_kubernetes_expects(overlay: str) -> None:
    for item in rendered(overlay):
        kubernetes_validate.validate(item, KUBERNETES, strict=True)


def test_a_wrong_object_would_be_noticed() -> None:
    engine = named(BASE, "StatefulSet", "tandem-engine")
    wrong = {**engine, "spec": {**engine["spec"], "replica": 2}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, KUBERNETES, strict=True)


@pytest.mark.parametrize("name", OURS)
def test_services_accept_their_arguments(name: str) -> None:
    assert settings_of(CONTAINERS[name]).service == name


def test_services_find_each_other() -> None:
    gateway, router, engine, draft = (settings_of(CONTAINERS[name]) for name in OURS)
    service = named(BASE, "Service", "tandem-router")
    ports = {port["name"]: f"{service['metadata']['name']}:{port['port']}" for port in service["spec"]["ports"]}
    assert gateway.router == ports["grpc"] and gateway.router_admin == ports["admin"]  # type: ignore[attr-defined]
    own = {port["name"]: port["containerPort"] for port in CONTAINERS["router"]["ports"]}
    assert own["grpc"] == port_of(router.listen) and own["admin"] == port_of(router.admin_listen)  # type: ignore[attr-defined]
    ((name,),) = [parse_engines(router.engines)[1]]  # type: ignore[attr-defined]
    headless = named(BASE, "Service", name.host)
    assert headless["spec"]["clusterIP"] == "None" and headless["spec"]["publishNotReadyAddresses"]
    assert headless["spec"]["ports"][0]["port"] == name.port == port_of(engine.listen)  # type: ignore[attr-defined]
    assert named(BASE, "StatefulSet", "tandem-engine")["spec"]["serviceName"] == name.host
    assert engine.draft == draft.listen  # type: ignore[attr-defined]
    assert gateway.service_token_file == router.service_token_file  # type: ignore[attr-defined]


def test_selectors_and_ports_name_pods_and_ports_that_exist() -> None:
    pods = {item["spec"]["template"]["metadata"]["labels"]["app"]: item for item in WORKLOADS}
    for item in WORKLOADS:
        assert item["spec"]["selector"]["matchLabels"] == item["spec"]["template"]["metadata"]["labels"]
    for item in BASE:
        if item["kind"] in ("Service", "PodDisruptionBudget"):
            selector = item["spec"]["selector"]
            app = selector.get("matchLabels", selector)["app"]
            assert app in pods
        if item["kind"] == "Service":
            names = {p["name"] for c in pods[app]["spec"]["template"]["spec"]["containers"] for p in c["ports"]}
            assert {port["targetPort"] for port in item["spec"]["ports"]} <= names
    assert {item["metadata"]["name"] for item in BASE if item["kind"] == "PodDisruptionBudget"} == set(PODS)


def listening(name: str) -> set[int]:
    """Ports that a service opens to other pods, by its settings."""
    settings: Any = settings_of(CONTAINERS[name])
    if name == "gateway":
        return {settings.port}
    if name == "router":
        return {port_of(settings.listen), port_of(settings.admin_listen), settings.metrics_port}
    return {port_of(settings.listen), port_of(settings.metrics_listen)}


@pytest.mark.parametrize("name", ["gateway", "router", "engine"])
def test_declared_ports_probes_and_policies_are_where_services_listen(name: str) -> None:
    container, ports = CONTAINERS[name], listening(name)
    assert {port["containerPort"] for port in container["ports"]} == ports
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        if "grpc" in container[probe]:
            assert container[probe]["grpc"]["port"] == port_of(settings_of(container).listen)  # type: ignore[attr-defined]
    policy = named(BASE, "NetworkPolicy", f"tandem-{name}")
    assert {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]} == ports
    item = next(item for item in WORKLOADS if item["metadata"]["name"] == f"tandem-{name}")
    annotations = item["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/scrape"] == "true" and int(annotations["prometheus.io/port"]) in ports


def test_only_gateways_reach_the_routers_admin_port_and_they_need_the_token() -> None:
    router = settings_of(CONTAINERS["router"])
    port = port_of(router.admin_listen)  # type: ignore[attr-defined]
    rules = named(BASE, "NetworkPolicy", "tandem-router")["spec"]["ingress"]
    opening = [rule for rule in rules if port in [entry["port"] for entry in rule["ports"]]]
    assert [rule["from"] for rule in opening] == [[{"podSelector": {"matchLabels": {"app": "tandem-gateway"}}}]]
    assert router.service_token_file == settings_of(CONTAINERS["gateway"]).service_token_file != ""  # type: ignore[attr-defined]


def test_an_engine_that_drains_is_unready_but_alive() -> None:
    engine = CONTAINERS["engine"]
    assert "service" not in engine["readinessProbe"]["grpc"]
    assert engine["livenessProbe"]["grpc"]["service"] == LIVE


def test_the_way_out_fits_into_the_grace() -> None:
    graces = {"gateway": "grace", "router": "drain_grace_s", "engine": "grace"}
    for name, field in graces.items():
        hook = CONTAINERS[name]["lifecycle"]["preStop"]
        before = hook["sleep"]["seconds"] if "sleep" in hook else float(hook["exec"]["command"][-1])
        own = getattr(settings_of(CONTAINERS[name]), field)
        pod = PODS[f"tandem-{name}"]
        assert pod["terminationGracePeriodSeconds"] >= before + own + 10, name
    drain = CONTAINERS["engine"]["lifecycle"]["preStop"]["exec"]["command"]
    assert drain[:2] == ["tandem", "drain"] and port_of(drain[2]) in listening("engine")


@pytest.mark.parametrize("name", sorted(PODS))
def test_pods_are_locked_down(name: str) -> None:
    pod = PODS[name]
    assert pod["enableServiceLinks"] is False and pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 10001
    volumes = {volume["name"] for volume in pod["volumes"]}
    item = next(item for item in WORKLOADS if item["metadata"]["name"] == name)
    volumes |= {claim["metadata"]["name"] for claim in item["spec"].get("volumeClaimTemplates", [])}
    for container in [*pod.get("initContainers", []), *pod["containers"]]:
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"] and not security["allowPrivilegeEscalation"]
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert "memory" in container["resources"]["limits"]
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes


def test_there_are_several_routers_and_engines_share_a_socket_with_their_draft_only() -> None:
    assert named(BASE, "Deployment", "tandem-router")["spec"]["replicas"] >= 2
    sockets = {"name": "sockets", "mountPath": "/run/tandem"}
    assert sockets in CONTAINERS["engine"]["volumeMounts"] and sockets in CONTAINERS["draft"]["volumeMounts"]
    assert CONTAINERS["draft"]["restartPolicy"] == "Always"
    assert {"name": "sockets", "emptyDir": {"medium": "Memory", "sizeLimit": "16Mi"}} in PODS["tandem-engine"][
        "volumes"
    ]


def test_without_a_rule_nobody_talks_to_anybody() -> None:
    default = named(BASE, "NetworkPolicy", "default")["spec"]
    assert default["podSelector"] == {} and default["policyTypes"] == ["Ingress", "Egress"]
    assert "ingress" not in default and [port["port"] for port in default["egress"][0]["ports"]] == [53, 53]


@needs_kustomize
def test_the_gpu_overlay_asks_for_one_and_keeps_the_rest() -> None:
    pod = named(rendered("gpu"), "StatefulSet", "tandem-engine")["spec"]["template"]["spec"]
    (engine,) = pod["containers"]
    assert engine["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert settings_of(engine).device == "cuda"  # type: ignore[attr-defined]
    assert engine["args"] == CONTAINERS["engine"]["args"] and engine["livenessProbe"]
    assert [container["name"] for container in pod["initContainers"]] == ["cache", "draft"]


def test_the_autoscaler_reads_what_routers_export() -> None:
    rules = yaml.safe_load((FOLDER / "autoscaling/adapter.yaml").read_text())["rules"]["external"]
    known = all_jobs()["tandem-router"]
    for rule in rules:
        names: list[str] = []

        def visit(node: Any, names: list[str] = names) -> bool:
            names += [node.name] if isinstance(node, promql.VectorSelector) else []
            return True

        promql.walk(promql.parse(rule["metricsQuery"].replace("<<.LabelMatchers>>", "")), visit)
        assert names and set(names) <= set(known)
    scaler = yaml.safe_load((FOLDER / "autoscaling/hpa.yaml").read_text())
    assert {metric["external"]["metric"]["name"] for metric in scaler["spec"]["metrics"]} == {
        rule["name"]["as"] for rule in rules
    }
    assert scaler["spec"]["scaleTargetRef"]["name"] in PODS
