"""The files of deploy/ against the schemas of who reads them; nothing is built or run."""

import dataclasses
import json
import re
import shlex
import sys
import types
import typing
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from moejax import notebook
from moejax.core.config import EngineConfig
from moejax.serving.tenants import Tenants

DEPLOY = Path(__file__).parents[1] / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
OBJECTS = [item for path in MANIFESTS for item in yaml.safe_load_all(path.read_text())]
COMPOSE = DEPLOY / "compose.yaml"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()


def of_kind(kind: str) -> dict[str, Any]:
    (found,) = [item for item in OBJECTS if item["kind"] == kind]
    return found


def steps(instruction: str) -> list[str]:
    """What follows each such instruction of the Dockerfile."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.MULTILINE).replace("\\\n", " ")
    return [line.partition(" ")[2] for line in text.splitlines() if line.startswith(f"{instruction} ")]


def arguments() -> dict[str, list[str]]:
    """The arguments of `python -m` that each file gives."""
    (command,) = steps("CMD")
    compose = yaml.safe_load(COMPOSE.read_text())["services"]["moejax"]["command"]
    pods = {item["kind"]: item["spec"]["template"]["spec"] for item in OBJECTS if "template" in item["spec"]}
    of_pods = {kind: pod["containers"][0]["args"] for kind, pod in pods.items()}
    return {"Dockerfile": json.loads(command), "compose": compose, **of_pods}


# -- Kubernetes ------------------------------------------------------------------------------------------


def models(version: str) -> types.ModuleType:
    """A group's dataclasses of Kubernetes' OpenAPI schema; the client that they belong to is not needed."""
    pytest.importorskip("lightkube.models", reason="the schemas are lightkube-models', of the extra dev")
    core, schema = types.ModuleType("lightkube.core"), types.ModuleType("lightkube.core.schema")
    vars(schema).update(dataclass=dataclasses.dataclass, field=dataclasses.field, DictMixin=object)
    for module in (core, schema):
        sys.modules.setdefault(module.__name__, module)
    name = f"core_{version}" if "/" not in version else version.replace("/", "_")
    return import_module(f"lightkube.models.{name}")


def faults(model: Any, value: Any, where: str) -> list[str]:
    """Where a value is not what the schema has: keys, kinds, what is missing."""
    origin, args = typing.get_origin(model), typing.get_args(model)
    if origin is typing.Union:
        arms = [faults(arm, value, where) for arm in args if arm is not type(None)]
        return min(arms, key=len) if value is not None else [f"{where} is null"]
    if origin is list:
        if not isinstance(value, list):
            return [f"{where} is no list"]
        return [fault for i, item in enumerate(value) for fault in faults(args[0], item, f"{where}[{i}]")]
    if dataclasses.is_dataclass(model):
        if not isinstance(value, dict):
            return [f"{where} is no object"]
        hints = typing.get_type_hints(model)
        fields = {field.name.rstrip("_"): field for field in dataclasses.fields(model)}
        found = [f"{where}.{key} is unknown" for key in value.keys() - fields.keys()]
        for key, field in fields.items():
            if key in value:
                found += faults(hints[field.name], value[key], f"{where}.{key}")
            elif field.default is field.default_factory is dataclasses.MISSING:
                found.append(f"{where}.{key} is missing")
        return found
    return [] if type(value) is (origin or model) else [f"{where} is {value!r}, no {model}"]


@pytest.mark.parametrize("item", OBJECTS, ids=lambda item: item["kind"])
def test_objects_are_what_kubernetes_api_has(item: dict[str, Any]) -> None:
    assert faults(getattr(models(item["apiVersion"]), item["kind"]), item, item["kind"]) == []


def test_the_check_finds_faults() -> None:
    model, item = models("apps/v1").Deployment, json.loads(json.dumps(of_kind("Deployment")))
    pod = item["spec"]["template"]["spec"]
    pod["containers"][0]["livenesProbe"] = {}
    pod["terminationGracePeriodSeconds"] = "60"
    del item["spec"]["selector"], pod["containers"][0]["name"]
    template = "Deployment.spec.template.spec"
    assert sorted(faults(model, item, "Deployment")) == [
        "Deployment.spec.selector is missing",
        f"{template}.containers[0].livenesProbe is unknown",
        f"{template}.containers[0].name is missing",
        f"{template}.terminationGracePeriodSeconds is '60', no <class 'int'>",
    ]


def test_objects_name_each_other() -> None:
    deployment, job, service = of_kind("Deployment"), of_kind("Job"), of_kind("Service")
    pod, claims = (
        deployment["spec"]["template"],
        {o["metadata"]["name"] for o in OBJECTS if "Claim" in o["kind"]},
    )
    labels, (server,) = pod["metadata"]["labels"], pod["spec"]["containers"]
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"] == labels
    assert job["spec"]["template"]["metadata"]["labels"] != labels
    assert service["spec"]["ports"][0]["targetPort"] == server["ports"][0]["name"] == "http"
    target = of_kind("HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]
    assert (target["apiVersion"], target["kind"]) == (deployment["apiVersion"], "Deployment")
    assert target["name"] == deployment["metadata"]["name"] and "replicas" not in deployment["spec"]
    probes = {name: probe["httpGet"] for name, probe in server.items() if name.endswith("Probe")}
    assert {probe["port"] for probe in probes.values()} == {"http"}
    paths = {name: probe["path"] for name, probe in probes.items()}
    assert paths == {"startupProbe": "/health", "livenessProbe": "/health", "readinessProbe": "/ready"}
    for spec in (pod["spec"], job["spec"]["template"]["spec"]):
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        mounts = spec["containers"][0]["volumeMounts"]
        assert {mount["name"] for mount in mounts} == volumes.keys()
        used = [
            v["persistentVolumeClaim"]["claimName"] for v in volumes.values() if "persistentVolumeClaim" in v
        ]
        assert len(used) == 1 and claims.issuperset(used)
        user = spec["securityContext"]
        assert user["runAsNonRoot"] and f"{user['runAsUser']}:{user['runAsGroup']}" == steps("USER")[-1]
    assert {m["name"]: m["mountPath"] for m in server["volumeMounts"]}["tenants"] == "/secrets"


# -- images, Compose, commands -----------------------------------------------------------------------------


def test_compose_is_of_its_specification() -> None:
    compose_spec = pytest.importorskip("compose_spec", reason="of the extra dev, on Linux")
    text = re.sub(r"\$\{\w+:(?:-([^}]*)|\?[^}]*)\}", lambda m: m[1] or "/given", COMPOSE.read_text())
    parsed = compose_spec.PyCompose.from_yaml(text)  # variables first, as Compose does
    assert sorted(parsed.service_names()) == ["grafana", "moejax", "prometheus"]
    with pytest.raises(ValueError, match="comand"):
        compose_spec.PyCompose.from_yaml(text.replace("command:", "comand:"))


def test_what_compose_names_is_there() -> None:
    content = yaml.safe_load(COMPOSE.read_text())
    services = content["services"]
    build = services["moejax"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).samefile(DEPLOY / "Dockerfile")
    assert set(build["args"]) <= {arg.partition("=")[0] for arg in steps("ARG")}
    mounts = [v.split(":") for s in services.values() for v in s["volumes"] if isinstance(v, str)]
    for source, *_ in mounts:
        assert (DEPLOY / source).exists() if source.startswith(".") else source in content["volumes"]
    assert "deploy/tenants.toml" in (DEPLOY.parent / ".gitignore").read_text().split()
    scraped = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"][0]
    (target,) = scraped["static_configs"][0]["targets"]
    provisioning = DEPLOY / "grafana" / "provisioning"
    source = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"][0]
    assert target == "moejax:8000" and source["url"] == "http://prometheus:9090"
    boards = yaml.safe_load((provisioning / "dashboards" / "moejax.yaml").read_text())["providers"][0]
    assert any(path.startswith(boards["options"]["path"]) for _, path, *_ in mounts)


def test_the_image_copies_what_is_there_and_runs_as_nobody_else() -> None:
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    for names in map(shlex.split, steps("COPY")):
        for name in names[:-1]:
            assert (DEPLOY.parent / name).exists() and f"!{name}" in ignored
    assert int(steps("USER")[-1].partition(":")[0]) > 0
    assert DOCKERFILE.index("\nUSER ") < DOCKERFILE.index("\nENTRYPOINT ") < DOCKERFILE.index("\nCMD ")
    (check,) = steps("HEALTHCHECK")
    assert "127.0.0.1:8000/health" in check and "8000" in steps("EXPOSE")
    images = [*steps("FROM"), *re.findall(r"image: (\S+)", COMPOSE.read_text())]
    assert all("." not in image.partition("/")[0].partition(":")[0] for image in images)  # Docker Hub's
    for extra in steps("ARG")[0].partition("=")[2].split(","):
        assert re.search(rf"^{extra} = \[", (DEPLOY.parent / "pyproject.toml").read_text(), re.MULTILINE)


@pytest.mark.parametrize("place", ["Dockerfile", "compose", "Deployment", "Job"])
def test_commands_compose(place: str) -> None:
    module, *overrides = arguments()[place]
    config = notebook.load_config(overrides, module.removeprefix("experiments."))
    if place != "Job":
        assert (config.serve.host, config.serve.port) == ("0.0.0.0", 8000)
        assert config.model.source == "/model"
    if place in ("compose", "Deployment"):
        where = {"compose": "/run/secrets", "Deployment": "/secrets"}[place]
        assert config.serve.api_keys_file == f"{where}/tenants.toml"
        example = Tenants(str(DEPLOY / "tenants.example.toml"))
        assert example.engine(config.engine).scheduling.tenants.keys() == {"interactive", "batch"}
        assert isinstance(config.engine, EngineConfig) and config.engine.policy == "fair"


def test_each_file_says_that_it_has_not_been_run() -> None:
    files = [COMPOSE, DEPLOY / "Dockerfile", DEPLOY / "prometheus.yml", *MANIFESTS]
    for path in [*files, *(DEPLOY / "grafana" / "provisioning").rglob("*.yaml")]:
        assert re.search(r"has not been (run|built)", path.read_text().split("\n\n")[0]), path
