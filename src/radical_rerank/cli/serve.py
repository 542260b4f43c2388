"""`radical serve`."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from radical_rerank.backbones import DEFAULT_MODEL
from radical_rerank.cli.common import (
    Agreement,
    Device,
    Dtype,
    Flops,
    Latency,
    ModelKwargs,
    ModelPreset,
    Permutations,
    Scorer,
    Speedup,
    log,
)
from radical_rerank.errors import InputError, needs_extra
from radical_rerank.service import (
    DEFAULT_DEADLINE,
    DEFAULT_DOWNSCALE_DELAY,
    DEFAULT_HOST,
    DEFAULT_KEEP,
    DEFAULT_METHOD,
    DEFAULT_PATIENCE,
    DEFAULT_PORT,
    DEFAULT_QUEUE,
    DEFAULT_UPSCALE_DELAY,
)

if TYPE_CHECKING:
    from radical_rerank.service.settings import Settings

app = typer.Typer()


# Most options are None unless given, so that the environment can set them.


@app.command()
def serve(
    model: Annotated[
        str | None, typer.Option(help="A model id or a folder.", show_default=DEFAULT_MODEL)
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="The pruning method.", show_default=DEFAULT_METHOD)
    ] = None,
    keep: Annotated[
        float | None,
        typer.Option(help="The fraction of visual tokens to keep.", show_default=str(DEFAULT_KEEP)),
    ] = None,
    speedup: Speedup = None,
    flops: Flops = None,
    latency: Latency = None,
    agreement: Agreement = None,
    permutations: Permutations = None,
    preset: ModelPreset = None,
    scorer: Scorer = None,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = DEFAULT_HOST,
    port: Annotated[int, typer.Option(help="The port to listen on.")] = DEFAULT_PORT,
    api_key: Annotated[list[str] | None, typer.Option(help="Require this API key. Can be repeated.")] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(help="Allow image URLs of this host. Can be repeated.", show_default="none"),
    ] = None,
    trusted_host: Annotated[
        list[str] | None,
        typer.Option(help="Answer only under this host name. Can be repeated.", show_default="any"),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(help="Let web pages of this origin call. Can be repeated.", show_default="none"),
    ] = None,
    queue: Annotated[
        int | None,
        typer.Option(
            help="Requests in flight, running or waiting. More get 429.", show_default=str(DEFAULT_QUEUE)
        ),
    ] = None,
    patience: Annotated[
        float | None,
        typer.Option(
            help="How long a request may wait, in units of one ranking's time. Longer waits get 429.",
            show_default=str(DEFAULT_PATIENCE),
        ),
    ] = None,
    deadline: Annotated[
        float | None,
        typer.Option(help="Timeout of a request, in seconds.", show_default=str(DEFAULT_DEADLINE)),
    ] = None,
    device: Device = None,
    dtype: Dtype = None,
    model_kwargs: ModelKwargs = None,
    ray: Annotated[bool, typer.Option("--ray", help="Deploy on Ray Serve.")] = False,
    ray_address: Annotated[
        str, typer.Option(help="Ray: the cluster to join (auto for the one on this machine), or local.")
    ] = "local",
    replicas: Annotated[int, typer.Option(min=1, help="Ray: replicas of the model to start with.")] = 1,
    max_replicas: Annotated[
        int | None, typer.Option(min=1, help="Ray: add replicas under load, up to this number.")
    ] = None,
    upscale_delay: Annotated[
        float, typer.Option(min=0, help="Ray: seconds of load before a replica is added.")
    ] = DEFAULT_UPSCALE_DELAY,
    downscale_delay: Annotated[
        float, typer.Option(min=0, help="Ray: seconds without load before a replica is removed.")
    ] = DEFAULT_DOWNSCALE_DELAY,
) -> None:
    """Serve reranking over HTTP, with a web page to try it.

    Every setting can also be given in the environment: RADICAL_SERVE_QUEUE for --queue, and so on.

    The guide docs/guides/service.md lists all settings.
    """
    settings = _settings(
        model=model,
        method=method,
        keep=keep,
        speedup=speedup,
        flops=flops,
        latency=latency,
        agreement=agreement,
        permutations=permutations,
        preset=preset,
        scorer=scorer,
        device=device,
        dtype=dtype,
        model_kwargs=model_kwargs,
        queue=queue,
        patience=patience,
        deadline=deadline,
        api_keys=api_key,
        allowed_hosts=allow_host,
        trusted_hosts=trusted_host,
        cors_origins=cors_origin,
    )
    if not ray:
        _run(settings, host, port)
        return
    with needs_extra("serve"):
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
    log.info("listening on http://%s:%d/ with Ray Serve; stop with Ctrl-C", host, port)
    wait()


def _settings(**given: Any) -> "Settings":
    """Return the settings: those that are given, else the environment's, else the defaults."""
    with needs_extra("serve"):
        from pydantic import ValidationError
        from pydantic_settings import SettingsError

        from radical_rerank.service.settings import Settings
    try:
        return Settings(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InputError(f"{where}: {first['msg']}" if where else first["msg"]) from None
    except SettingsError as error:  # a list in the environment that is not JSON
        raise InputError(f"{error}; write lists in the environment as JSON") from None


def _run(settings: "Settings", host: str, port: int) -> None:
    with needs_extra("serve"):
        import uvicorn

        from radical_rerank.service.app import create_app
    log.info("starting on http://%s:%d/ (web page) and http://%s:%d/docs (API)", host, port, host, port)
    uvicorn.run(create_app(settings), host=host, port=port, timeout_graceful_shutdown=int(settings.deadline))
