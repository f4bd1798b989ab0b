-- title: Steps of the fleet
-- description: What each step takes of all TTFT, over all connectors, the largest first.
-- column label: Kind of traffic; empty is production
-- column step: Step on the critical path
-- column class: compute, capacity, transfer, coordination or unknown
-- column requests: Requests that spent time in it
-- column share_percent: Its part of all TTFT
-- column mean_ms: Mean over all requests, those without it counted as 0, ms
-- column p50_ms: Median over the requests that had it, ms
-- column p90_ms: 90th percentile over the requests that had it, ms
-- column p99_ms: 99th percentile over the requests that had it, ms
WITH total AS (
    SELECT label, count(*) AS requests, sum(ttft_ns)::DOUBLE AS ttft_ns
    FROM requests
    WHERE ttft_ns IS NOT NULL
    GROUP BY label
)
SELECT
    s.label,
    step,
    class,
    count(*) AS requests,
    round(100 * sum(ns) / any_value(total.ttft_ns), 2) AS share_percent,
    round(sum(ns) / any_value(total.requests) / 1e6, 3) AS mean_ms,
    round(quantile_cont(ns, 0.5) / 1e6, 3) AS p50_ms,
    round(quantile_cont(ns, 0.9) / 1e6, 3) AS p90_ms,
    round(quantile_cont(ns, 0.99) / 1e6, 3) AS p99_ms
FROM request_steps AS s
JOIN total ON s.label IS NOT DISTINCT FROM total.label
WHERE s.ttft_ns IS NOT NULL AND s.ns > 0
GROUP BY s.label, step, class
ORDER BY s.label, sum(ns) DESC, step
