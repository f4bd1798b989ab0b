-- title: Time to first token, by prompt length
-- description: Percentiles of TTFT within bands of prompt length, and what it was made of on average: the five parts
--   add up to mean_ms. Compute and transfer grow with the prompt; what does not is the price of the hand-over.
-- column label: Kind of traffic; empty is production
-- column from_tokens: Prompt tokens at which the band begins; NULL where the length is not known
-- column below_tokens: Prompt tokens at which the next band begins; NULL where there is none
-- column cached_percent: Prompt tokens that P took from its own prefix cache, of those known, percent
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
WITH placed AS (
    SELECT
        *,
        CASE
            WHEN prompt_tokens < 256 THEN 1
            WHEN prompt_tokens < 1024 THEN 2
            WHEN prompt_tokens < 4096 THEN 3
            WHEN prompt_tokens < 16384 THEN 4
            WHEN prompt_tokens < 65536 THEN 5
            WHEN prompt_tokens >= 65536 THEN 6
        END AS place
    FROM waits
    WHERE ttft_ns IS NOT NULL
)
SELECT
    label,
    [0, 256, 1024, 4096, 16384, 65536][place] AS from_tokens,
    [256, 1024, 4096, 16384, 65536, NULL][place] AS below_tokens,
    round(
        100 * sum(p_cached_tokens) / nullif(sum(prompt_tokens) FILTER (p_cached_tokens IS NOT NULL), 0), 2
    ) AS cached_percent,
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
FROM placed
GROUP BY label, place
ORDER BY label, place
