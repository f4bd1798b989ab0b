-- title: Time to first token, by model
-- description: Percentiles of TTFT of each model and connector, and what it was made of on average: the five parts
--   add up to mean_ms.
-- column label: Kind of traffic; empty is production
-- column model: Model name as served; NULL where it is not known
-- column connector: push, pull, bidirectional, or local where no KV was moved
-- column requests: Requests with a first token
-- column p50_ms: Median TTFT, ms
-- column p90_ms: 90th percentile of TTFT, ms
-- column p99_ms: 99th percentile of TTFT, ms
-- column mean_ms: Mean TTFT, ms
-- column compute_ms: Mean time in compute, ms
-- column capacity_ms: Mean time waiting for a place in a batch or for KV blocks, ms
-- column transfer_ms: Mean time of KV on the wire, ms
-- column coordination_ms: Mean coordination wait, ms: accelerators would not shorten it
-- column unknown_ms: Mean time between boundaries that were not observed, ms
SELECT
    label,
    model,
    connector,
    count(*) AS requests,
    round(quantile_cont(ttft_ns, 0.5) / 1e6, 3) AS p50_ms,
    round(quantile_cont(ttft_ns, 0.9) / 1e6, 3) AS p90_ms,
    round(quantile_cont(ttft_ns, 0.99) / 1e6, 3) AS p99_ms,
    round(avg(ttft_ns) / 1e6, 3) AS mean_ms,
    round(avg(compute_ns) / 1e6, 3) AS compute_ms,
    round(avg(capacity_ns) / 1e6, 3) AS capacity_ms,
    round(avg(transfer_ns) / 1e6, 3) AS transfer_ms,
    round(avg(coordination_ns) / 1e6, 3) AS coordination_ms,
    round(avg(coalesce(unknown_ns, 0)) / 1e6, 3) AS unknown_ms
FROM waits
WHERE ttft_ns IS NOT NULL
GROUP BY label, model, connector
ORDER BY label, requests DESC, model, connector
