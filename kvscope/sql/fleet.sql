-- title: The fleet
-- description: Time to first token, what it was made of, throughput and what went wrong: over all requests of a
--   label, per connector and per P x D pair. Percentiles are exact and of each row's own requests.
-- column label: Kind of traffic; empty is production
-- column level: all, connector or pair
-- column connector: push, pull, bidirectional or local; NULL on the level all
-- column p_engine: Prefill engine; NULL on the other levels than pair
-- column d_engine: Decode engine; NULL on the other levels than pair
-- column requests: Requests with a first token
-- column generating: Of these: still in flight (asked of a daemon)
-- column not_finished: Requests that were lost, in error, aborted or incomplete
-- column p50_ttft_ms: Median TTFT, ms
-- column p90_ttft_ms: 90th percentile of TTFT, ms
-- column p99_ttft_ms: 99th percentile of TTFT, ms
-- column mean_ttft_ms: Mean TTFT, ms
-- column compute_percent: Compute, of all TTFT; this and the next four add up to 100
-- column capacity_percent: Waiting for a place in a batch or for KV blocks, of all TTFT
-- column transfer_percent: KV on the wire, of all TTFT
-- column coordination_percent: Coordination wait, of all TTFT: accelerators would not shorten it
-- column unknown_percent: Between boundaries that were not observed, of all TTFT
-- column p50_tpot_ms: Median time per output token after the first, ms
-- column p90_tpot_ms: 90th percentile of the time per output token after the first, ms
-- column requests_per_s: Such requests per second, from since to until; without since, from first to last arrival
-- column output_tokens_per_s: Output tokens of requests that arrived in the same time and are over, per second of
--   it: less than the fleet generates, where answers are long against the window
-- column not_joined: Requests of which one leg never found its partner
-- column peer_not_instrumented: Requests of which one leg was on an engine that does not record
-- column recomputed: Requests for which D computed prompt tokens that P had
-- column read_after_expiry: Requests whose completion came after the lease had expired: D may have read other KV
-- column clock_error_ms: Greatest bound on the clock error between the legs of a request, ms
-- column clamped: Requests of which boundaries were out of order and were moved
WITH span AS (
    SELECT
        (CASE WHEN $since > 0 THEN $until - $since ELSE max(arrived_at_ns) - min(arrived_at_ns) END) / 1e9 AS seconds
    FROM requests
), found AS (
    SELECT
        *,
        coalesce(unknown_ns, 0) AS not_observed_ns,
        CASE WHEN output_tokens > 1 THEN decode_generate_ns / (output_tokens - 1) END AS tpot_ns
    FROM waits
)
SELECT
    coalesce(label, '') AS label,
    CASE
        WHEN grouping(p_engine) = 0 THEN 'pair'
        WHEN grouping(connector) = 0 THEN 'connector'
        ELSE 'all'
    END AS level,
    connector,
    p_engine,
    d_engine,
    count(ttft_ns) AS requests,
    count(ttft_ns) FILTER (outcome = 'in flight') AS generating,
    count(id) FILTER (outcome IN ('lost', 'error', 'aborted', 'incomplete')) AS not_finished,
    round(quantile_cont(ttft_ns, [0.5, 0.9, 0.99])[1] / 1e6, 3) AS p50_ttft_ms,
    round(quantile_cont(ttft_ns, [0.5, 0.9, 0.99])[2] / 1e6, 3) AS p90_ttft_ms,
    round(quantile_cont(ttft_ns, [0.5, 0.9, 0.99])[3] / 1e6, 3) AS p99_ttft_ms,
    round(avg(ttft_ns) / 1e6, 3) AS mean_ttft_ms,
    round(100 * sum(compute_ns) FILTER (ttft_ns IS NOT NULL) / nullif(sum(ttft_ns), 0), 2) AS compute_percent,
    round(100 * sum(capacity_ns) FILTER (ttft_ns IS NOT NULL) / nullif(sum(ttft_ns), 0), 2) AS capacity_percent,
    round(100 * sum(transfer_ns) FILTER (ttft_ns IS NOT NULL) / nullif(sum(ttft_ns), 0), 2) AS transfer_percent,
    round(100 * sum(coordination_ns) FILTER (ttft_ns IS NOT NULL) / nullif(sum(ttft_ns), 0), 2) AS coordination_percent,
    round(100 * sum(not_observed_ns) FILTER (ttft_ns IS NOT NULL) / nullif(sum(ttft_ns), 0), 2) AS unknown_percent,
    round(quantile_cont(tpot_ns, [0.5, 0.9])[1] / 1e6, 3) AS p50_tpot_ms,
    round(quantile_cont(tpot_ns, [0.5, 0.9])[2] / 1e6, 3) AS p90_tpot_ms,
    round(count(ttft_ns) / nullif(any_value(seconds), 0), 3) AS requests_per_s,
    round(
        coalesce(sum(output_tokens) FILTER (outcome <> 'in flight'), 0) / nullif(any_value(seconds), 0), 3
    ) AS output_tokens_per_s,
    count(id) FILTER (joined_by = 'unjoined') AS not_joined,
    count(id) FILTER (joined_by = 'peer not instrumented') AS peer_not_instrumented,
    count(id) FILTER (recomputed_tokens > 0) AS recomputed,
    count(id) FILTER (read_after_expiry) AS read_after_expiry,
    round(max(clock_error_ns) / 1e6, 3) AS clock_error_ms,
    count(id) FILTER (clamped_ns > 0) AS clamped
FROM span LEFT JOIN found ON true
GROUP BY GROUPING SETS ((label), (label, connector), (label, connector, p_engine, d_engine))
HAVING level = 'all' OR (count(id) > 0 AND (level = 'connector' OR (p_engine IS NOT NULL AND d_engine IS NOT NULL)))
ORDER BY label, level, requests DESC, connector, p_engine, d_engine
