-- title: Pairs of prefill and decode engine
-- description: TTFT, coordination wait and transfer rate of each P x D pair: a pair that is slower than its
--   peers has a link or an engine of its own to look at. Rates are per request, all its ranks together.
-- column label: Kind of traffic; empty is production
-- column connector: push, pull or bidirectional
-- column p_engine: Prefill engine
-- column d_engine: Decode engine
-- column requests: Requests of the pair
-- column not_finished: Of these: lost, in error, aborted or incomplete
-- column p50_ttft_ms: Median TTFT, ms
-- column p99_ttft_ms: 99th percentile of TTFT, ms
-- column p50_coordination_ms: Median coordination wait, ms
-- column p50_transfer_ms: Median transfer time on the critical path, ms
-- column transferred_bytes: Bytes moved between the two
-- column p50_gb_per_s: Median of bytes over the longest time on the wire that the polls allow (a lower bound)
-- column best_gb_per_s: Fastest rate known of the pair
SELECT
    label,
    connector,
    p_engine,
    d_engine,
    count(*) AS requests,
    count(*) FILTER (outcome IN ('lost', 'error', 'aborted', 'incomplete')) AS not_finished,
    round(quantile_cont(ttft_ns, 0.5) / 1e6, 3) AS p50_ttft_ms,
    round(quantile_cont(ttft_ns, 0.99) / 1e6, 3) AS p99_ttft_ms,
    round(quantile_cont(coordination_ns, 0.5) / 1e6, 3) AS p50_coordination_ms,
    round(quantile_cont(transfer_ns, 0.5) / 1e6, 3) AS p50_transfer_ms,
    sum(transfer_bytes)::BIGINT AS transferred_bytes,
    round(quantile_cont(transfer_bytes / nullif(wire_upper_ns, 0), 0.5), 3) AS p50_gb_per_s,
    round(max(best_rate_bytes_per_s) / 1e9, 3) AS best_gb_per_s
FROM waits
WHERE p_engine IS NOT NULL AND d_engine IS NOT NULL
GROUP BY label, connector, p_engine, d_engine
ORDER BY label, connector, p50_ttft_ms DESC NULLS LAST, p_engine, d_engine
