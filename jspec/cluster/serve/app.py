"""The Ray Serve application: an HTTP server and its replicas."""

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any, cast

from jspec.cluster.model_pair import Draft, ModelPair
from jspec.cluster.resources import Resources, check_resources, default_resources, require_ray
from jspec.cluster.serve.replicated_engine import ONGOING_PER_SLOT
from jspec.core.program_cache import prepare_environment
from jspec.core.tokenizer import Tokenizer
from jspec.engine import Engine
from jspec.engine.grammars import Grammars

_ROUTER = "jspec.cluster.serve.prefix_router.PrefixRouter"
_SLOTS = 8  # the default of `Engine`
_MAX_ONGOING_REQUESTS = 100_000  # the server has its own limit, with an error that names it
_DRAIN_SECONDS = 5  # for the requests of a stopping replica, before they move to another one


@dataclasses.dataclass(frozen=True)
class ServiceSpec:
    """The models to serve and the number of their replicas.

    Attributes:
        make_engine: a function that each replica calls. It returns an engine that is not running, and its tokenizer.
        make_tokenizer: a function that returns the tokenizer.
        name: the model name that clients use.
        slots: the number of slots of each replica's engine.
        replicas: the smallest and the largest number of replicas. Ray chooses by the number of requests in progress.
        resources: the resources of each replica.
        server_options: the options of `jspec.serve.app.Server`.
    """

    make_engine: Callable[[], tuple[Engine, Tokenizer]]
    make_tokenizer: Callable[[], Tokenizer]
    name: str
    slots: int
    replicas: tuple[int, int]
    resources: Resources
    server_options: Mapping[str, Any]

    def application(self) -> Any:
        """Return the Ray Serve application.

        Raises:
            ValueError: the numbers of replicas are invalid, or the running cluster does not have the resources.
        """
        from ray import serve

        from jspec.cluster.serve.ingress import Ingress

        min_replicas, max_replicas = self.replicas
        if not 1 <= min_replicas <= max_replicas:
            raise ValueError(f"replicas is {self.replicas} (smallest, largest); expected 1 <= smallest <= largest.")
        check_resources(max_replicas, self.resources)
        ingress = _deployment(
            cast(type, serve.ingress()(Ingress)),
            name="ingress",
            ray_actor_options=Resources(cpus=0).actor_options(),
            max_ongoing_requests=_MAX_ONGOING_REQUESTS,
            graceful_shutdown_timeout_s=_DRAIN_SECONDS,
            max_constructor_retry_count=3,
        )
        return ingress.bind(self._replicas(), self.make_tokenizer, self.name, max_replicas, dict(self.server_options))

    def _replicas(self) -> Any:
        """Return the deployment of the replicas, with its arguments."""
        from jspec.cluster.serve.replica import Replica

        (min_replicas, max_replicas), slots = self.replicas, self.slots
        count: dict[str, Any] = {"num_replicas": max_replicas}
        if min_replicas < max_replicas:
            scaling = {
                "min_replicas": min_replicas,
                "max_replicas": max_replicas,
                "target_ongoing_requests": max(1.0, 0.75 * slots),
            }
            count = {"autoscaling_config": scaling}
        replicas = _deployment(
            Replica,
            **count,
            name="replicas",
            ray_actor_options=self.resources.actor_options(),
            max_ongoing_requests=ONGOING_PER_SLOT * slots,
            graceful_shutdown_timeout_s=_DRAIN_SECONDS,
            health_check_period_s=2,
            health_check_timeout_s=5,
            max_constructor_retry_count=3,
            request_router_config={"request_router_class": _ROUTER, "request_router_kwargs": {"slack": slots // 2}},
        )
        return replicas.bind(functools.partial(_start, self.make_engine), _replica_id)


def app(
    target: str | None = None,
    draft: Draft = None,
    *,
    replicas: int | tuple[int, int] = 1,
    resources: Resources | None = None,
    dtype: str | None = None,
    quantize: str | None = None,
    name: str | None = None,
    server_options: Mapping[str, Any] | None = None,
    **engine_options: Any,
) -> Any:
    """Return a Ray Serve application, for `ray.serve.run`, that serves `target` to clients of OpenAI's API.

    A request with a seed gets the text of `jspec.generate`, whichever replica decodes it. If a replica fails, its
    requests continue on another one, after the last token that the server received.

    Args:
        target: the target's path, name or Hugging Face repo id. Every replica loads it. None for the bundled target.
        draft: the same for a draft model; "lookup" or "none"; or a function from the target to a drafter, such as
            ``functools.partial(jspec.EagleDrafter.load, "runs/drafter")``. The default is that of `jspec.pretrained`.
        replicas: the number of replicas, or the smallest and the largest number. Between these, Ray chooses by the
            number of requests in progress.
        resources: the resources of each replica. By default, one GPU or one TPU chip if the connected cluster has any,
            and otherwise one CPU core.
        dtype, quantize: same as in `jspec.load`.
        name: the model name that clients use. The default is `target`.
        server_options: the options of `jspec.serve.app.Server`. Clients that use another host name than that of this
            machine need its `access` or `api_key`.
        engine_options: the options of each replica's `jspec.engine.Engine`.

    Raises:
        ModuleNotFoundError: Ray is not installed.
        TypeError: `target` is not a string, or `draft` is a model.
        ValueError: `replicas` is invalid, or the connected cluster does not have the resources.
    """
    require_ray()
    pair = ModelPair(target, draft, dtype, quantize)
    options: dict[str, Any] = {"slots": _SLOTS, "max_length": "auto", **engine_options}
    options = {"max_waiting": 4 * options["slots"], **options}
    spec = ServiceSpec(
        functools.partial(pair.engine, options),
        pair.tokenizer,
        name or target or "bundled",
        options["slots"],
        replicas if isinstance(replicas, tuple) else (replicas, replicas),
        resources or default_resources(),
        {"version": version("jspec"), **(server_options or {})},
    )
    return spec.application()


def from_config(config: dict[str, Any]) -> Any:
    """Return `app` with the arguments in a Ray Serve config file. JSPEC_API_KEY provides the API key, if it is set.

    Args:
        config: the arguments. `replicas` may be a list, and `resources` is a dict of the fields of `Resources`.

    Raises:
        TypeError, ValueError: as in `app`, or `resources` has an unknown field.
    """
    arguments = dict(config)
    if isinstance(arguments.get("replicas"), list):
        arguments["replicas"] = tuple(arguments["replicas"])
    if "resources" in arguments:
        arguments["resources"] = Resources(**arguments["resources"])
    if key := os.environ.get("JSPEC_API_KEY"):
        arguments["server_options"] = {"api_key": key, **arguments.get("server_options", {})}
    return app(**arguments)


def _deployment(kind: type, **options: Any) -> Any:
    from ray import serve

    return cast(Any, serve).deployment(kind).options(**options)


def _start(make_engine: Callable[[], tuple[Engine, Tokenizer]]) -> tuple[Engine, Grammars | None]:
    """Return an engine and the factory of constraints. This runs in each replica."""
    from jspec.serve.app import grammars_for

    prepare_environment()
    engine, tokenizer = make_engine()
    return engine, grammars_for(engine.target, tokenizer)


def _replica_id() -> str:
    from ray import serve

    return serve.get_replica_context().replica_id.unique_id
