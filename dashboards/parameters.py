"""What an operator may set in the rules: each threshold once, with its meaning and its default."""

from __future__ import annotations

import re
from typing import Annotated, get_type_hints

import msgspec
from msgspec import Meta

from kvscope import metrics
from kvscope.errors import UsageError


class Parameters(msgspec.Struct, frozen=True, kw_only=True):
    """Thresholds of the alerts. Units are in the names."""

    ttft_slo_s: Annotated[float, Meta(description="A first token that takes longer is too slow")] = 2.0
    ttft_objective: Annotated[float, Meta(description="Share of requests that must meet it")] = 0.99
    burn_fast: Annotated[
        float, Meta(description="Times the budget's even rate, over 5 minutes and an hour, that pages")
    ] = 14.4
    burn_slow: Annotated[
        float, Meta(description="Times the budget's even rate, over 30 minutes and 6 hours, that warns")
    ] = 6.0
    coordination_share: Annotated[
        float, Meta(description="Share of TTFT that coordination wait may take")
    ] = 0.4
    coordination_s: Annotated[
        float, Meta(description="Mean coordination wait below which its share is no matter")
    ] = 0.05
    min_requests: Annotated[
        int, Meta(description="So many requests a share or a mean of 15 minutes must rest on")
    ] = 20
    lease_expired_share: Annotated[float, Meta(description="Share of leases that may expire")] = 0.02
    recomputed_share: Annotated[
        float, Meta(description="Share of requests whose prompt D may compute again")
    ] = 0.01
    pair_slowdown: Annotated[
        float, Meta(description="So many times worse than its own day a pair may be")
    ] = 2.0
    min_reuse_requests: Annotated[
        int, Meta(description="So many requests in an hour it takes to say that reuse never engages")
    ] = 50
    reuse_missed_share: Annotated[
        float, Meta(description="Share of the KV offered for a later turn that may go unused")
    ] = 0.9
    not_joined_share: Annotated[
        float, Meta(description="Share of requests of which one leg may be missing")
    ] = 0.05
    clock_error_s: Annotated[
        float, Meta(description="Bound on the clock error between two legs that still tells steps apart")
    ] = 0.01
    queue_share: Annotated[float, Meta(description="How full the queue before the daemon's store may be")] = (
        0.5
    )
    commit_s: Annotated[float, Meta(description="Mean duration of a commit to the store")] = 1.0
    restarts: Annotated[int, Meta(description="Restarts of a daemon in half an hour that are no loop")] = 2
    quiet_traffic: Annotated[
        str,
        Meta(description="Kinds of traffic (a regular expression on KVSCOPE_LABEL) that never alert"),
    ] = "bench.*|demo.*|simulated.*|test.*"
    runbook: Annotated[
        str, Meta(description="Where this page is kept: the address before #, in every alert")
    ] = "docs/runbook.md"

    @property
    def users(self) -> str:
        """A matcher of the traffic that alerts."""
        return f'traffic!~"{self.quiet_traffic}"'


_TYPES = get_type_hints(Parameters, include_extras=True)


def listed() -> list[tuple[str, object, str]]:
    """Every parameter's name, default and meaning."""
    defaults = Parameters()
    return [
        (name, getattr(defaults, name), type_.__metadata__[0].description) for name, type_ in _TYPES.items()
    ]


def check(parameters: Parameters) -> None:
    """Raise UsageError, which says what would fit, for values that make no rule."""
    bounds = metrics.TTFT.buckets
    if parameters.ttft_slo_s not in bounds:
        fitting = ", ".join(f"{bound:g}" for bound in bounds)
        raise UsageError(f"ttft_slo_s is {parameters.ttft_slo_s:g}: it must be a bucket's bound: {fitting}")
    if not 0 < parameters.ttft_objective < 1:
        raise UsageError(f"ttft_objective is {parameters.ttft_objective:g}: it must lie between 0 and 1")
    for text in (parameters.quiet_traffic, parameters.runbook):
        if not text.isprintable() or '"' in text or "\\" in text:
            raise UsageError(f"{text!r}: quotes, backslashes and control characters don't go into a rule")
    try:
        re.compile(parameters.quiet_traffic)
    except re.error as error:
        raise UsageError(f"quiet_traffic is no regular expression: {error}") from None
