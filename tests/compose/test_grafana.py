"""ES-052, AR-014: Grafana reads the Prometheus of Compose, and its dashboards name metrics that exist."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

from penstock.producers.gateway.figures import GatewayFigures
from penstock.registry.metrics import GATEWAY_METRICS, METRICS, READY
from penstock.workers.observe.metrics import GenerationFigures, InferenceMetrics
from tests.compose.promql import Expression, PromqlError, Sample, read
from tests.servers import ROOT

COMPOSE = ROOT / "compose"
GRAFANA = COMPOSE / "grafana"
DASHBOARDS = ("fleet", "generation")
COLUMNS = 24
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"]
_COUNTED: dict[str, Any] = dict.fromkeys(GenerationFigures.__struct_fields__, 1)
FIGURES = GenerationFigures(**_COUNTED | {"first_token_s": [0.5], "inter_token_s": [0.5]})
UNITS = {"s", "short", "percentunit", "reqps"}
"""Those of Grafana; `suffix:TEXT` writes the text after the number."""
OF_NO_WORKER = ("penstock_webhooks_",)
"""The deliverer of webhooks counts these."""


def families(text: str) -> dict[str, Family]:
    return {family.name: family for family in text_string_to_metric_families(text)}


def worker_page(metrics: InferenceMetrics) -> str:
    registry = CollectorRegistry()
    registry.register(metrics)
    return generate_latest(registry).decode()


def existing_samples() -> dict[str, Sample]:
    """Names and kinds as the pages of a worker and of a gateway have them, labels by the table, and Prometheus's own
    `up`. Prometheus adds the labels instance and job to all."""
    labels = {metric.name: metric.labels for metric in (*METRICS, *GATEWAY_METRICS)}
    page = worker_page(InferenceMetrics((0.1,))) + GatewayFigures().page({})[1].decode()
    found = {"up": Sample("up", "gauge", frozenset({"instance", "job"}))}
    for family in families(page).values():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        own = frozenset({*labels.pop(name), "instance", "job"})
        if family.type == "histogram":
            found[f"{name}_bucket"] = Sample(f"{name}_bucket", "histogram", own | {"le"})
            for suffix in ("_count", "_sum"):
                found[name + suffix] = Sample(name + suffix, "histogram", own)
        else:
            assert family.type in ("counter", "gauge")
            found[name] = Sample(name, "counter" if family.type == "counter" else "gauge", own)
    assert not labels
    return found


SAMPLES = existing_samples()
VALUES = {(metric.name, metric.labels[-1]): {*values} for metric, values in FIGURES.by_kind().items()}
"""The values of a label that never has others."""


@dataclass(frozen=True)
class Query:
    """One expression of a panel, with the text that names its lines."""

    panel: Mapping[str, Any]
    text: str
    legend: str

    def read(self) -> Expression:
        return checked(self.text)


def checked(text: str) -> Expression:
    """Raises PromqlError for an expression that names what does not exist, fixed values of labels included."""
    expression = read(text, SAMPLES)
    for selector in expression.selectors:
        for label, operator, value in selector.matchers:
            if value.startswith("$"):
                if operator != "=~":
                    raise PromqlError(f"the variable {value} has several values, and {operator} takes one")
            elif operator != "=" or value not in VALUES.get((selector.sample.name, label), ()):
                raise PromqlError(f"{selector.sample.name} never has {label}{operator}{value!r}")
    return expression


def dashboard(name: str) -> dict[str, Any]:
    read_back: dict[str, Any] = json.loads((GRAFANA / "dashboards" / f"{name}.json").read_text())
    return read_back


def panels(name: str) -> list[dict[str, Any]]:
    """All but the titles of rows."""
    return [panel for panel in dashboard(name)["panels"] if panel["type"] != "row"]


def queries(name: str) -> Iterator[Query]:
    for panel in panels(name):
        for target in panel["targets"]:
            yield Query(panel, target["expr"], target["legendFormat"])


def mounts() -> dict[str, Path]:
    """What the container reads, by its path there."""
    volumes = [volume.split(":") for volume in SERVICES["grafana"]["volumes"] if volume.startswith(".")]
    assert all(mode == "ro" for _, _, mode in volumes)
    return {target: COMPOSE / source for source, target, _ in volumes}


def source() -> dict[str, Any]:
    (found,) = yaml.safe_load((GRAFANA / "datasources.yml").read_text())["datasources"]
    assert isinstance(found, dict)
    return found


every_dashboard = pytest.mark.parametrize("name", DASHBOARDS)


@every_dashboard
def test_expressions_name_what_exists(name: str):
    """Each expression names samples, labels and fixed values that exist; rates are those of counters; and the text of
    a line shows labels that the result has."""
    found = list(queries(name))
    assert len(found) > 20
    for query in found:
        try:
            expression = query.read()
        except PromqlError as error:
            pytest.fail(f"{query.panel['title']}: {error} in {query.text}")
        assert {*re.findall(r"{{(\w+)}}", query.legend)} <= expression.labels, query
        assert expression.labels <= {*re.findall(r"{{(\w+)}}", query.legend)}, f"lines with one name: {query}"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("sum(rate(penstock_job_total[5m]))", "no metric 'penstock_job_total'"),
        ("sum(rate(penstock_jobs[5m]))", "no metric 'penstock_jobs'"),
        ("sum(rate(infer_latency_seconds[5m]))", "no metric 'infer_latency_seconds'"),
        ("sum(rate(penstock_queue_depth[5m]))", "of the gauge"),
        ("sum(increase(penstock_pages[5m]))", "of the gauge"),
        ("sum(rate(penstock_jobs_total))", "needs a range"),
        ("sum(penstock_jobs_total[5m])", "without rate"),
        ("sum(penstock_first_token_seconds_sum)", "without rate"),
        ("sum(rate(penstock_jobs_total[5 m]))", "the range"),
        ("sum by (outcom) (rate(penstock_jobs_total[5m]))", "no series has"),
        ("sum by (priority) (penstock_pages)", "no series has"),
        ('sum(penstock_jobs_total{model="$model"})', "no label 'model'"),
        ('sum(penstock_jobs_total{model_name="$model"})', "several values"),
        ('sum(penstock_pages{kind="usd"})', "never has"),
        ('sum(penstock_generation_requests{state="used"})', "never has"),
        ("histogram_quantile(0.5, sum(rate(infer_latency_seconds_bucket[5m])))", "by le"),
        ("histogram_quantile(0.5, sum by (le) (rate(infer_latency_seconds_sum[5m])))", "no series has"),
        ("sum by (kind) (penstock_pages) / sum(penstock_pages)", "do not match"),
        ("sum(penstock_pages", "is missing"),
        ("sum(penstock_pages))", "after the end"),
        ("sum(penstock_pages) %", "not understood"),
        ("deriv(penstock_pages)", "no metric 'deriv'"),
    ],
)
def test_wrong_expressions_are_found(text: str, problem: str):
    """A misspelt name, label or value and a function of the wrong kind are errors."""
    with pytest.raises(PromqlError, match=re.escape(problem)):
        checked(text)


def test_rules_know_the_samples_of_a_real_page():
    """The samples of pages that have counted something are those that expressions may name."""
    metrics, gateway = InferenceMetrics((0.1,)), GatewayFigures()
    metrics.generation("writer", "1", FIGURES, wait_s=1.0)
    metrics.outcome("writer", "1", "queue", "completed")
    gateway.count("/v1/jobs", "POST", 202, 0.1)
    found = families(worker_page(metrics) + gateway.page({})[1].decode())
    samples = [sample for family in found.values() for sample in family.samples]
    shown = {sample.name: {*sample.labels} for sample in samples if not sample.name.endswith("_created")}
    assert len(shown) > 40
    for name, labels in shown.items():
        assert labels == SAMPLES[name].labels - {"instance", "job"}, name


def test_every_metric_of_generation_is_shown():
    """What an engine reports is on the dashboard of generation."""
    metrics = InferenceMetrics((0.1,))
    metrics.generation("writer", "1", FIGURES, wait_s=1.0)
    reported = {
        name
        for name, family in families(worker_page(metrics)).items()
        if any(sample.value for sample in family.samples)
    }
    assert {"penstock_pages", "penstock_inter_token_seconds", "penstock_draft_tokens"} < reported
    shown = {selector.sample.name for query in queries("generation") for selector in query.read().selectors}
    families_shown = {re.sub(r"_(total|bucket|count|sum)$", "", name) for name in shown}
    assert reported - families_shown == set()


@every_dashboard
def test_variables_choose_what_a_panel_shows(name: str):
    """The variables list labels that exist, and each selector of a worker's metric has those that it can have."""
    variables = {each["name"]: each for each in dashboard(name)["templating"]["list"]}
    assert variables.keys() == {"model", "worker"}
    for variable in variables.values():
        assert variable["datasource"]["uid"] == source()["uid"]
        metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"]).groups()  # type: ignore[union-attr]  # None fails
        assert label in SAMPLES[metric].labels
    gateway = {metric.name for metric in GATEWAY_METRICS}
    for query in queries(name):
        assert {*re.findall(r"\$(\w+)", query.text)} <= {*variables, "__rate_interval"}
        for selector in query.read().selectors:
            metric = re.sub(r"_(bucket|count|sum)$", "", selector.sample.name)
            if metric in gateway or metric == "up":
                continue
            chosen = {label: value for label, _, value in selector.matchers if value.startswith("$")}
            models = {"model", "model_name"} & selector.sample.labels
            assert bool(models) == (metric != READY.name)
            expected = dict.fromkeys(models, "$model")
            if not metric.startswith(OF_NO_WORKER):
                expected["instance"] = "$worker"
            assert chosen == expected, query


def test_a_fleet_without_workers_shows_no_workers():
    """No series is there then. A panel of one number would go on showing the last one that was."""
    (query,) = [query for query in queries("fleet") if f"({READY.name}{{" in query.text]
    assert query.panel["type"] == "stat"
    assert query.text.endswith(" or vector(0)")


@every_dashboard
def test_panels_explain_themselves(name: str):
    """Each panel has a title of its own, a unit that its metrics have, and a description of one sentence."""
    titles = Counter(panel["title"] for panel in panels(name))
    assert set(titles.values()) == {1}
    for panel in panels(name):
        title = panel["title"]
        assert re.fullmatch(r"[A-Z0-9][^.]+\.", panel["description"]), title
        unit = panel["fieldConfig"]["defaults"]["unit"]
        assert unit in UNITS or re.fullmatch(r"suffix:[a-z]+(/s)?", unit), title
        assert panel["datasource"] == {"type": source()["type"], "uid": source()["uid"]}, title
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]) > 0
    for query in queries(name):
        names = [selector.sample.name for selector in query.read().selectors]
        is_time = any(re.search(r"_seconds(_bucket|_sum)?$", each) for each in names)
        unit = query.panel["fieldConfig"]["defaults"]["unit"]
        assert (unit == "s") == is_time, query
        is_rate = query.text.count("rate(") == 1 and not is_time
        assert (unit == "reqps" or unit.endswith("/s")) == is_rate, query


@every_dashboard
def test_panels_lie_side_by_side(name: str):
    """Ids are unique, and panels lie inside the grid, none over another."""
    found = dashboard(name)["panels"]
    assert len({panel["id"] for panel in found}) == len(found)
    taken: dict[tuple[int, int], str] = {}
    for panel in found:
        place = panel["gridPos"]
        assert min(place["w"], place["h"]) > 0
        assert min(place["x"], place["y"]) >= 0
        assert place["x"] + place["w"] <= COLUMNS
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, f"{panel['title']} lies over {taken.get((x, y))}"
                taken[x, y] = panel["title"]


@every_dashboard
def test_files_have_one_form(name: str):
    """Two spaces per level, as Grafana exports it, and one line break at the end."""
    text = (GRAFANA / "dashboards" / f"{name}.json").read_text()
    assert text == json.dumps(json.loads(text), indent=2, ensure_ascii=False) + "\n"


def test_dashboards_are_all_there_and_link_to_each_other():
    """The folder has these two with uids of their own, and each link leads to one of them."""
    assert sorted(path.name for path in (GRAFANA / "dashboards").iterdir()) == [f"{name}.json" for name in DASHBOARDS]
    boards = [dashboard(name) for name in DASHBOARDS]
    uids = {board["uid"] for board in boards}
    assert len(uids) == len({board["title"] for board in boards}) == len(boards)
    links = [link["url"] for board in boards for link in board["links"]]
    assert {link.removeprefix("/d/") for link in links} == uids


def test_grafana_reads_the_prometheus_of_compose():
    """The data source has the address of the service on a network of both, and the interval of its scrapes."""
    found, address = source(), urlsplit(source()["url"])
    assert (found["type"], found["access"], found["isDefault"]) == ("prometheus", "proxy", True)
    service = SERVICES[address.hostname or ""]
    assert service["image"].startswith("prom/prometheus:")
    assert service["ports"][0].rpartition(":")[2] == str(address.port)
    assert SERVICES["grafana"]["networks"] == ["metrics"]
    assert "metrics" in service["networks"]
    assert address.hostname in SERVICES["grafana"]["depends_on"]
    for name in ("prometheus.yml", "gpu.yml"):
        scraped = yaml.safe_load((COMPOSE / "prometheus" / name).read_text())
        assert found["jsonData"]["timeInterval"] == scraped["global"]["scrape_interval"]


def test_provisioning_names_mounted_paths():
    """Grafana finds the data source, the dashboards' provider, and the dashboards where both files say they are."""
    mounted = mounts()
    folders = {str(Path(target).parent): path for target, path in mounted.items() if path.suffix == ".yml"}
    assert folders == {
        f"/etc/grafana/provisioning/{kind}": GRAFANA / f"{kind}.yml" for kind in ("datasources", "dashboards")
    }
    (provider,) = yaml.safe_load((GRAFANA / "dashboards.yml").read_text())["providers"]
    assert provider["type"] == "file"
    assert mounted[provider["options"]["path"]] == GRAFANA / "dashboards"
    home = Path(SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (mounted[str(home.parent)] / home.name).is_file()


def test_grafana_is_closed_and_silent():
    """Nobody enters without the password, nobody signs up, and nothing asks the internet."""
    given = SERVICES["grafana"]["environment"]
    assert given["GF_SECURITY_ADMIN_PASSWORD"].startswith("${GRAFANA_PASSWORD:?")
    switches = {name: value for name, value in given.items() if value in ("true", "false")}
    assert switches == {
        "GF_AUTH_ANONYMOUS_ENABLED": "false",
        "GF_USERS_ALLOW_SIGN_UP": "false",
        "GF_USERS_ALLOW_ORG_CREATE": "false",
        "GF_ANALYTICS_REPORTING_ENABLED": "false",
        "GF_ANALYTICS_CHECK_FOR_UPDATES": "false",
        "GF_ANALYTICS_CHECK_FOR_PLUGIN_UPDATES": "false",
        "GF_ANALYTICS_FEEDBACK_LINKS_ENABLED": "false",
        "GF_NEWS_NEWS_FEED_ENABLED": "false",
        "GF_PLUGINS_PLUGIN_ADMIN_ENABLED": "false",
        "GF_PLUGINS_PREINSTALL_DISABLED": "true",
        "GF_PLUGINS_PUBLIC_KEY_RETRIEVAL_DISABLED": "true",
        "GF_SECURITY_DISABLE_GRAVATAR": "true",
        "GF_SNAPSHOTS_EXTERNAL_ENABLED": "false",
    }
    assert "/api/health" in " ".join(SERVICES["grafana"]["healthcheck"]["test"])
