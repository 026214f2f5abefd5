"""`penstock serve`: the gateway for HTTP and gRPC in the foreground."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import click

from penstock.compose.terminal import connected

__all__ = ["serve"]

_file = click.Path(path_type=Path, exists=True, dir_okay=False, readable=True)


@click.command()
@click.option("--host", help="Address to bind (default: the setting, 127.0.0.1).")
@click.option("--port", type=click.IntRange(0, 65535), help="Port; 0 takes any free one (default: the setting, 8000).")
@click.option(
    "--grpc-port",
    type=click.IntRange(0, 65535),
    help="Port of gRPC; 0 takes any free one (default: the setting, 50051).",
)
@click.option("--grpc/--no-grpc", default=None, help="Whether to serve gRPC, too (default: the setting, yes).")
@click.option("--workers", type=click.IntRange(1), help="Processes (default: the setting, 1).")
@click.option(
    "--uds", type=click.Path(path_type=Path), help="A socket in the file system, in place of host and port; no gRPC."
)
@click.option("--tls-certificate", type=_file, help="A PEM file with the certificate and its chain.")
@click.option("--tls-key", type=_file, help="A PEM file with its key.")
@click.pass_obj
def serve(
    environ: Mapping[str, str],
    host: str | None,
    port: int | None,
    grpc_port: int | None,
    grpc: bool | None,
    workers: int | None,
    uds: Path | None,
    tls_certificate: Path | None,
    tls_key: Path | None,
) -> None:
    """Run the gateway until Ctrl-C: jobs, predictions, OpenAI's embeddings and the Open Inference Protocol.

    It serves HTTP, and gRPC on a port of its own.

    It needs a broker: PENSTOCK_REDIS_URL, or a stack that `penstock up` runs. /docs describes the routes. Callers need
    an API key once `penstock keys create` has made one, and always where --host is not the loopback; see the setting
    server.api_keys.

    \b
    penstock serve
    penstock serve --port 8080 --workers 2
    penstock serve --uds gateway.sock
    """
    from penstock.producers.gateway import server as gateway

    if (tls_certificate is None) != (tls_key is None):
        raise click.UsageError("Found one of --tls-certificate and --tls-key. Expected both, or none")
    options = {"server.host": host, "server.port": port, "server.workers": workers}
    settings = connected(environ, {**options, "server.grpc_enabled": grpc, "server.grpc_port": grpc_port})
    server = settings.inference.server
    has_grpc = server.grpc_enabled and uds is None
    # The processes of the gateway read their settings again.
    os.environ.update({**environ, "PENSTOCK_INFERENCE_SERVER_HOST": server.host})
    # uvicorn repeats the signal that stopped it, when it has ended in order.
    signal.signal(signal.SIGTERM, lambda *_: None)
    with suppress(KeyboardInterrupt):
        gateway.serve(
            settings.inference,
            gateway.Binding(
                server.host, server.port, uds, tls_certificate, tls_key, server.grpc_port if has_grpc else None
            ),
            _show,
        )


def _show(url: str, rpc: str) -> None:
    if rpc:
        click.echo(f"gRPC     {rpc}")
    click.echo(f"Gateway  {url}")
