"""`dspark serve`: the OpenAI-compatible API."""

import importlib.util
import os
from typing import Annotated

import typer

from dspark.cli import options
from dspark.errors import DsparkError

_NEEDED = ("fastapi", "uvicorn", "prometheus_client")


def serve(
    model: options.Model = "smollm2",
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is every network.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(help="Clients must send it; better set in the environment as DSPARK_API_KEY.")
    ] = None,
    allowed_hosts: Annotated[
        str | None,
        typer.Option(
            help="Names in the Host header that are answered beside localhost, comma-separated; * is any. "
            "The default is none without a key on a loopback address, and any otherwise."
        ),
    ] = None,
    served_model_name: Annotated[str | None, typer.Option(help="What clients call the model; default --model.")] = None,
    drafter: options.Drafter = "auto",
    corpus_table: options.CorpusTable = "auto",
    proposer: options.Proposer = "auto",
    policy: options.Policy = "auto",
    profile: options.Profile = "auto",
    max_batch: Annotated[int, typer.Option(help="Most answers decoded at once.")] = 32,
    max_queue: Annotated[int, typer.Option(help="Most answers that may wait for a place.")] = 64,
    max_tokens: Annotated[int, typer.Option(help="Longest answer to a chat request that names no limit.")] = 1024,
    request_timeout: Annotated[float, typer.Option(help="Seconds an answer may take, waiting included.")] = 600.0,
    max_body_mb: Annotated[float, typer.Option(help="Largest request, in megabytes.")] = 2.0,
    drain_seconds: Annotated[float, typer.Option(help="At shutdown, how long running answers may go on.")] = 20.0,
    exact: options.Exact = False,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    kv_gb: options.KvGb = 1.0,
    prefix_cache: Annotated[
        bool, typer.Option(help="Keep the cache of ended requests for prompts that begin alike.")
    ] = True,
    threads: options.Threads = None,
) -> None:
    """Serve a model to OpenAI clients.

    Examples:

    \b
    dspark serve --model smollm2
    curl http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' \\
      -d '{"model": "smollm2", "messages": [{"role": "user", "content": "Hello"}]}'
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise DsparkError(
            f"dspark serve needs {', '.join(missing)}; install what it needs with pip install 'dspark[serve]'."
        )
    from dspark.serve import ServeConfig
    from dspark.serve.guard import is_loopback
    from dspark.serve.run import listen, run_server

    key = os.environ.get("DSPARK_API_KEY") if api_key is None else api_key
    here_only = is_loopback(host)
    config = ServeConfig(
        model_name=model if served_model_name is None else served_model_name,
        api_key=key,
        allowed_hosts=_names(allowed_hosts, guarded=key is None and here_only),
        max_queue=max_queue,
        request_timeout_s=request_timeout,
        max_body_bytes=int(max_body_mb * 1e6),
        drain_s=drain_seconds,
        default_max_tokens=max_tokens,
    )
    socket = listen(host, port)  # before the slow part
    if key is None and not here_only:
        typer.echo(f"dspark: warning: anyone who reaches {host} can use this server; set --api-key.", err=True)
    engine = options.load_engine(
        model=model,
        drafter=drafter,
        corpus_table=corpus_table,
        proposer=proposer,
        policy=policy,
        profile=profile,
        max_batch=max_batch,
        exact=exact,
        device=device,
        dtype=dtype,
        kv_gb=kv_gb,
        prefix_cache=prefix_cache,
        threads=threads,
    )
    run_server(
        engine, config, socket, on_ready=lambda url: typer.echo(f"Serving {config.model_name} on {url}", err=True)
    )


def _names(given: str | None, guarded: bool) -> tuple[str, ...] | None:
    """The hosts requests may be for, beside this machine's loopback; None: any."""
    if given is None:
        return () if guarded else None
    names = tuple(name.strip().lower() for name in given.split(","))
    return None if "*" in names else names
