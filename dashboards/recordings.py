"""Recording rules: figures that are asked for often, over long windows, or by several alerts.

A window in which nothing passed gives no sample, never NaN: every division is by something above 0.
"""

from __future__ import annotations

from typing import NamedTuple

from kvscope import metrics as m
from kvscope.dashboards.parameters import Parameters

GROUP = ", ".join(m.GROUP)
PAIR = f"p_engine, d_engine, {GROUP}"


class Recording(NamedTuple):
    """A series that Prometheus computes and keeps."""

    name: str
    group: str
    expr: str
    doc: str
    labels: tuple[tuple[str, str], ...] = ()


def recordings(parameters: Parameters) -> list[Recording]:
    """All of them, in the order in which they are evaluated."""
    requests = "kvscope-requests"
    found = [
        Recording(
            "kvscope:requests:rate5m",
            requests,
            f"sum by ({GROUP}, outcome) (rate({m.REQUESTS.name}[5m]))",
            "Requests per second that ended, by outcome.",
        ),
        *(
            Recording(
                f"kvscope:ttft_class:ratio_rate{window}",
                requests,
                over(
                    f"sum by ({GROUP}, class) (rate({m.TTFT_CLASS.name}[{window}]))",
                    f"on ({GROUP}) group_left ()",
                    f"sum by ({GROUP}) (rate({m.TTFT_CLASS.name}[{window}]))",
                ),
                f"Share of each class in all TTFT of {window}; the classes add up to 1.",
            )
            for window in ("5m", "1h")
        ),
        Recording(
            "kvscope:ttft_step:ratio_rate5m",
            requests,
            over(
                f'sum by ({GROUP}, step, class) (rate({m.STEP.name}_sum{{step!="decode.generate"}}[5m]))',
                f"on ({GROUP}) group_left ()",
                f"sum by ({GROUP}) (rate({m.TTFT_CLASS.name}[5m]))",
            ),
            "Share of each step in all TTFT of 5m.",
        ),
    ]
    for metric, figure in ((m.TTFT, "ttft"), (m.TPOT, "tpot")):
        for quantile in ("0.5", "0.9", "0.99"):
            found.append(
                Recording(
                    f"kvscope:{figure}_seconds:quantile_rate5m",
                    requests,
                    f"histogram_quantile({quantile}, sum by (le, {GROUP}) (rate({metric.name}_bucket[5m])))\n"
                    f"and sum by ({GROUP}) (rate({metric.name}_count[5m])) > 0",
                    f"Quantile of {figure.upper()}; quantiles don't add up and can't be averaged.",
                    (("quantile", quantile),),
                )
            )
    for window in ("5m", "30m", "1h", "6h"):
        slo = repr(float(parameters.ttft_slo_s))
        share = over(
            f'sum by ({GROUP}) (rate({m.TTFT.name}_bucket{{le="{slo}"}}[{window}]))',
            "",
            f"sum by ({GROUP}) (rate({m.TTFT.name}_count[{window}]))",
        )
        found.append(
            Recording(
                f"kvscope:ttft_over_slo:ratio_rate{window}",
                requests,
                f"1 - {share}",
                f"Share of requests of {window} whose TTFT was longer than {parameters.ttft_slo_s:g} s.",
            )
        )
    for window in ("15m", "1d"):
        seconds = f'rate({m.PAIR_TTFT_CLASS.name}{{class="transfer"}}[{window}])'
        waits = f'rate({m.PAIR_TTFT_CLASS.name}{{class="coordination"}}[{window}])'
        found += [
            Recording(
                f"kvscope:pair_transfer:bytes_per_second{window}",
                "kvscope-pairs",
                over(
                    f"(sum by ({PAIR}) (rate({m.PAIR_BYTES.name}[{window}])) > 0)",
                    "",
                    f"sum by ({PAIR}) ({seconds})",
                ),
                f"Bytes of a pair in {window} per second of TTFT in transfer: its rate as users feel it.",
            ),
            Recording(
                f"kvscope:pair_coordination:seconds_per_request{window}",
                "kvscope-pairs",
                over(
                    f"sum by ({PAIR}) ({waits})",
                    "",
                    f"sum by ({PAIR}) (rate({m.PAIR_REQUESTS.name}[{window}]))",
                ),
                f"Mean coordination wait of a pair's requests in {window}.",
            ),
        ]
    found.append(
        Recording(
            "kvscope:events_lost:ratio_rate5m",
            "kvscope-trust",
            f"sum by (engine, traffic) (rate({m.EVENTS_LOST.name}[5m]))\n"
            f"/ (sum by (engine, traffic) (rate({m.EVENTS_LOST.name}[5m]))\n"
            f"   + sum by (engine, traffic) (rate({m.EVENTS_READ.name}[5m])) > 0)",
            "Share of an engine's events that were lost.",
        )
    )
    return found


def over(part: str, matching: str, whole: str) -> str:
    """A share; nothing where the whole is nothing."""
    return f"{part}\n/ {matching}{' ' if matching else ''}({whole} > 0)"
