-- title: Steps on the critical path
-- description: What each step takes of all TTFT of a connector, and its percentiles over the requests that had it.
-- column label: Kind of traffic; empty is production
-- column connector: push, pull, bidirectional or local
-- column step: Step on the critical path
-- column class: compute, capacity, transfer, coordination or unknown
-- column requests: Requests that spent time in it
-- column share_percent: Its part of all TTFT of this label and connector
-- column mean_ms: Mean over all requests of this label and connector, those without it counted as 0, ms
-- column p50_ms: Median over the requests that had it, ms
-- column p90_ms: 90th percentile over the requests that had it, ms
-- column p99_ms: 99th percentile over the requests that had it, ms
WITH totals AS (
    SELECT label, connector, count(*) AS requests, sum(ttft_ns)::DOUBLE AS ttft_ns
    FROM requests
    WHERE ttft_ns IS NOT NULL
    GROUP BY label, connector
)
SELECT
    s.label,
    s.connector,
    s.step,
    s.class,
    count(*) AS requests,
    round(100 * sum(s.ns) / any_value(t.ttft_ns), 2) AS share_percent,
    round(sum(s.ns) / any_value(t.requests) / 1e6, 3) AS mean_ms,
    round(quantile_cont(s.ns, 0.5) / 1e6, 3) AS p50_ms,
    round(quantile_cont(s.ns, 0.9) / 1e6, 3) AS p90_ms,
    round(quantile_cont(s.ns, 0.99) / 1e6, 3) AS p99_ms
FROM request_steps AS s
JOIN totals AS t ON s.label IS NOT DISTINCT FROM t.label AND s.connector IS NOT DISTINCT FROM t.connector
WHERE s.ttft_ns IS NOT NULL AND s.ns > 0
GROUP BY s.label, s.connector, s.step, s.class
ORDER BY s.label, s.connector, share_percent DESC, s.step
