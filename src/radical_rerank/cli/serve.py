"""`radical serve`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from radical_rerank.cli.common import Device, Dtype, log, missing_extra
from radical_rerank.errors import InputError

app = typer.Typer()


@app.command()
def serve(
    model: Annotated[
        str | None, typer.Option(help="A model id or a folder; by default the embedded.")
    ] = None,
    method: Annotated[str | None, typer.Option(help="The default method: radical.")] = None,
    keep: Annotated[float | None, typer.Option(help="The default budget: 0.2.")] = None,
    host: Annotated[str, typer.Option(help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Where to listen.")] = 8000,
    api_key: Annotated[list[str] | None, typer.Option(help="A key that clients must send.")] = None,
    allow_host: Annotated[list[str] | None, typer.Option(help="A host that image URLs may name.")] = None,
    trusted_host: Annotated[
        list[str] | None, typer.Option(help="A name that clients may call this service by; any by default.")
    ] = None,
    cors_origin: Annotated[list[str] | None, typer.Option(help="A web origin that may call.")] = None,
    queue: Annotated[
        int | None, typer.Option(help="Requests inside at once, running or waiting: 32.")
    ] = None,
    patience: Annotated[
        float | None,
        typer.Option(help="How many rankings' time a request may wait before it gets 429: 0.7."),
    ] = None,
    deadline: Annotated[float | None, typer.Option(help="Seconds per request: 60.")] = None,
    device: Device = None,
    dtype: Dtype = None,
    ray: Annotated[bool, typer.Option("--ray", help="Deploy on Ray Serve.")] = False,
    ray_address: Annotated[
        str, typer.Option(help="On Ray: join this cluster (auto: the one of this machine); local: start one.")
    ] = "local",
    replicas: Annotated[int, typer.Option(min=1, help="On Ray: models to start with.")] = 1,
    max_replicas: Annotated[
        int | None, typer.Option(min=1, help="On Ray: add models under load, up to so many.")
    ] = None,
    upscale_delay: Annotated[
        float, typer.Option(min=0, help="On Ray: seconds of load before a model is added.")
    ] = 10.0,
    downscale_delay: Annotated[
        float, typer.Option(min=0, help="On Ray: seconds without it before one is taken away.")
    ] = 300.0,
) -> None:
    """Serve rerank over HTTP, with a page to try it.

    Everything can also be set in the environment, as RADICAL_SERVE_QUEUE and so on; so can further limits
    (see docs/deploy.md).
    """
    try:
        import uvicorn
        from pydantic import ValidationError
        from pydantic_settings import SettingsError

        from radical_rerank.service.app import create_app
        from radical_rerank.service.settings import Settings
    except ImportError as error:
        raise missing_extra(error, "serve") from None
    given: dict[str, Any] = {
        "model": model,
        "method": method,
        "keep": keep,
        "device": device,
        "dtype": dtype,
        "queue": queue,
        "patience": patience,
        "deadline": deadline,
        "api_keys": api_key,
        "allowed_hosts": allow_host,
        "trusted_hosts": trusted_host,
        "cors_origins": cors_origin,
    }
    try:
        settings = Settings(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InputError(f"{where}: {first['msg']}" if where else first["msg"]) from None
    except SettingsError as error:  # a list in the environment that is not JSON
        raise InputError(f"{error}; lists in the environment are JSON") from None
    if ray:
        from radical_rerank.service.on_ray import deploy, wait

        deploy(
            settings,
            ray_address,
            host=host,
            port=port,
            replicas=replicas,
            max_replicas=max_replicas,
            upscale_delay=upscale_delay,
            downscale_delay=downscale_delay,
        )
        log.info(f"http://{host}:{port}/ on Ray; end with Ctrl-C")
        wait()
        return
    log.info(f"http://{host}:{port}/ for people, /docs for programs")
    uvicorn.run(create_app(settings), host=host, port=port, timeout_graceful_shutdown=int(settings.deadline))
