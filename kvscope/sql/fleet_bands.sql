-- title: What TTFT is made of, by percentile band
-- description: The typical request and the slow ones need not wait for the same thing: the mean of each class within
--   four bands of TTFT. The five parts add up to mean_ms. A band without requests is left out.
-- column label: Kind of traffic; empty is production
-- column band: Percentiles of TTFT: p0-50, p50-90, p90-99 or p99-100
-- column requests: Requests in the band
-- column from_ms: Where the band begins: that percentile of TTFT, ms
-- column to_ms: Where the band ends, ms
-- column mean_ms: Mean TTFT, ms
-- column compute_ms: Mean time in compute, ms
-- column capacity_ms: Mean time waiting for a place in a batch or for KV blocks, ms
-- column transfer_ms: Mean time of KV on the wire, ms
-- column coordination_ms: Mean coordination wait, ms: accelerators would not shorten it
-- column unknown_ms: Mean time between boundaries that were not observed, ms
-- column main_step: The step that is the longest one in most of these requests
WITH edges AS (
    SELECT
        label,
        min(ttft_ns) AS p0,
        quantile_cont(ttft_ns, 0.5) AS p50,
        quantile_cont(ttft_ns, 0.9) AS p90,
        quantile_cont(ttft_ns, 0.99) AS p99,
        max(ttft_ns) AS p100
    FROM requests
    GROUP BY label
), placed AS (
    SELECT
        waits.*,
        edges.* EXCLUDE (label),
        CASE WHEN ttft_ns <= p50 THEN 0 WHEN ttft_ns <= p90 THEN 1 WHEN ttft_ns <= p99 THEN 2 ELSE 3 END AS place
    FROM waits
    JOIN edges ON waits.label IS NOT DISTINCT FROM edges.label
    WHERE ttft_ns IS NOT NULL
), longest AS (
    SELECT label, place, first(main_step ORDER BY requests DESC, main_step) AS main_step
    FROM (SELECT label, place, main_step, count(*) AS requests FROM placed WHERE main_step IS NOT NULL GROUP BY ALL)
    GROUP BY label, place
)
SELECT
    placed.label,
    ['p0-50', 'p50-90', 'p90-99', 'p99-100'][placed.place + 1] AS band,
    count(*) AS requests,
    round(any_value([p0, p50, p90, p99][placed.place + 1]) / 1e6, 3) AS from_ms,
    round(any_value([p50, p90, p99, p100][placed.place + 1]) / 1e6, 3) AS to_ms,
    round(avg(ttft_ns) / 1e6, 3) AS mean_ms,
    round(avg(compute_ns) / 1e6, 3) AS compute_ms,
    round(avg(capacity_ns) / 1e6, 3) AS capacity_ms,
    round(avg(transfer_ns) / 1e6, 3) AS transfer_ms,
    round(avg(coordination_ns) / 1e6, 3) AS coordination_ms,
    round(avg(coalesce(unknown_ns, 0)) / 1e6, 3) AS unknown_ms,
    any_value(longest.main_step) AS main_step
FROM placed
LEFT JOIN longest ON placed.place = longest.place AND placed.label IS NOT DISTINCT FROM longest.label
GROUP BY placed.label, placed.place
ORDER BY placed.label, placed.place
