-- title: Coordination against load
-- description: Does waiting grow with load? Requests are grouped by how many others were in flight when the second
--   began in which they arrived. Coordination that is there at low load too is the hand-over's own; what grows with
--   load is capacity or polling. Load counts the requests that the question is about and that have a first token, all
--   labels together, so it is too low shortly after `since`. One whose end was not observed counts until its first
--   token.
-- column label: Kind of traffic; empty is production
-- column in_flight_from: Requests in flight at which the band begins
-- column in_flight_to: Requests in flight at which it ends
-- column requests: Requests with a first token that arrived at such a load
-- column arrivals_per_s: Mean number of requests that arrived in the same second
-- column p50_ttft_ms: Median TTFT, ms
-- column p90_ttft_ms: 90th percentile of TTFT, ms
-- column p50_coordination_ms: Median coordination wait, ms
-- column p90_coordination_ms: 90th percentile of the coordination wait, ms
-- column coordination_percent: Coordination wait, of all TTFT
-- column capacity_percent: Waiting for a place in a batch or for KV blocks, of all TTFT
-- column compute_percent: Compute, of all TTFT
-- column transfer_percent: KV on the wire, of all TTFT
WITH changes AS (
    SELECT arrived_at_ns // 1_000_000_000 AS second, count(*) AS arrived, 0 AS ended
    FROM requests
    WHERE ttft_ns IS NOT NULL
    GROUP BY second
    UNION ALL
    SELECT
        (arrived_at_ns + ttft_ns + coalesce(decode_generate_ns, 0)) // 1_000_000_000 AS second,
        0 AS arrived,
        count(*) AS ended
    FROM requests
    WHERE ttft_ns IS NOT NULL AND (decode_generate_ns IS NOT NULL OR outcome IS DISTINCT FROM 'in flight')
    GROUP BY second
), seconds AS (
    SELECT
        second,
        sum(arrived) AS arrived,
        sum(sum(arrived) - sum(ended)) OVER (ORDER BY second) - (sum(arrived) - sum(ended)) AS in_flight
    FROM changes
    GROUP BY second
), placed AS (
    -- Bands: 0, 1, 2 to 3, 4 to 7, 8 to 15 and so on.
    SELECT waits.*, arrived, CASE WHEN in_flight < 1 THEN 0 ELSE floor(log2(in_flight))::INTEGER + 1 END AS place
    FROM waits
    JOIN seconds ON arrived_at_ns // 1_000_000_000 = second
    WHERE ttft_ns IS NOT NULL
)
SELECT
    label,
    CASE place WHEN 0 THEN 0 ELSE (1 << (place - 1)) END::BIGINT AS in_flight_from,
    CASE place WHEN 0 THEN 0 ELSE (1 << place) - 1 END::BIGINT AS in_flight_to,
    count(*) AS requests,
    round(avg(arrived), 2) AS arrivals_per_s,
    round(quantile_cont(ttft_ns, 0.5) / 1e6, 3) AS p50_ttft_ms,
    round(quantile_cont(ttft_ns, 0.9) / 1e6, 3) AS p90_ttft_ms,
    round(quantile_cont(coordination_ns, 0.5) / 1e6, 3) AS p50_coordination_ms,
    round(quantile_cont(coordination_ns, 0.9) / 1e6, 3) AS p90_coordination_ms,
    round(100 * sum(coordination_ns) / nullif(sum(ttft_ns), 0), 2) AS coordination_percent,
    round(100 * sum(capacity_ns) / nullif(sum(ttft_ns), 0), 2) AS capacity_percent,
    round(100 * sum(compute_ns) / nullif(sum(ttft_ns), 0), 2) AS compute_percent,
    round(100 * sum(transfer_ns) / nullif(sum(ttft_ns), 0), 2) AS transfer_percent
FROM placed
GROUP BY label, place
ORDER BY label, place
