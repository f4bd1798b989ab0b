-- title: TTFT over time
-- description: TTFT and the mean of each class in about 60 spans of at least a second, by arrival, from since to until
--   (without since, from the first to the last arrival). The five parts add up to mean_ms. A span in which no
--   request arrived that has a first token is left out.
-- column label: Kind of traffic; empty is production
-- column at_ns: Start of the span, Unix nanoseconds
-- column requests: Requests with a first token that arrived in it
-- column p50_ttft_ms: Median TTFT, ms
-- column p99_ttft_ms: 99th percentile of TTFT, ms
-- column mean_ms: Mean TTFT, ms
-- column compute_ms: Mean time in compute, ms
-- column capacity_ms: Mean time waiting for a place in a batch or for KV blocks, ms
-- column transfer_ms: Mean time of KV on the wire, ms
-- column coordination_ms: Mean coordination wait, ms
-- column unknown_ms: Mean time between boundaries that were not observed, ms
WITH span AS (
    SELECT
        greatest(
            1_000_000_000,
            (CASE WHEN $since > 0 THEN $until - $since ELSE max(arrived_at_ns) - min(arrived_at_ns) END + 59) // 60
        )::BIGINT AS ns
    FROM requests
)
SELECT
    label,
    arrived_at_ns // span.ns * span.ns AS at_ns,
    count(*) AS requests,
    round(quantile_cont(ttft_ns, 0.5) / 1e6, 3) AS p50_ttft_ms,
    round(quantile_cont(ttft_ns, 0.99) / 1e6, 3) AS p99_ttft_ms,
    round(avg(ttft_ns) / 1e6, 3) AS mean_ms,
    round(avg(compute_ns) / 1e6, 3) AS compute_ms,
    round(avg(capacity_ns) / 1e6, 3) AS capacity_ms,
    round(avg(transfer_ns) / 1e6, 3) AS transfer_ms,
    round(avg(coordination_ns) / 1e6, 3) AS coordination_ms,
    round(avg(coalesce(unknown_ns, 0)) / 1e6, 3) AS unknown_ms
FROM waits, span
WHERE ttft_ns IS NOT NULL
GROUP BY label, at_ns
ORDER BY label, at_ns
