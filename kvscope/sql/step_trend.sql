-- title: Steps over time
-- description: Percentiles of each step in about 30 spans of at least a second, by arrival, from since to until
--   (without since, from the first to the last arrival). Of a million requests and more an even sample is
--   looked at: one_in says so. `fleet_trend` tells TTFT and its classes.
-- column label: Kind of traffic; empty is production
-- column at_ns: Start of the span, Unix nanoseconds
-- column step: Step on the critical path
-- column class: compute, capacity, transfer, coordination or unknown
-- column requests: Requests that arrived in the span and spent time in the step
-- column share_percent: Its part of all TTFT of the span
-- column p50_ms: Median over the requests that had it, ms
-- column p90_ms: 90th percentile over the requests that had it, ms
-- column p99_ms: 99th percentile over the requests that had it, ms
-- column one_in: One in so many requests was looked at; 1 is all of them, and then the figures are exact
WITH span AS (
    SELECT
        greatest(
            1_000_000_000,
            (CASE WHEN $since > 0 THEN $until - $since ELSE max(arrived_at_ns) - min(arrived_at_ns) END + 29) // 30
        )::BIGINT AS ns
    FROM requests
), wide AS (
    -- A column per step, whose names have a dot but for `unknown`: a row per request and step would be too many.
    SELECT
        label,
        arrived_at_ns // span.ns * span.ns AS at_ns,
        sum(ttft)::DOUBLE AS all_ns,
        {
            requests: count(nullif(COLUMNS('[.]|unknown'), 0)),
            ns: sum(COLUMNS('[.]|unknown')),
            percentiles: quantile_cont(nullif(COLUMNS('[.]|unknown'), 0), [0.5, 0.9, 0.99])
        }
    FROM step_values
    CROSS JOIN span
    WHERE id % $one_in::UBIGINT = 0
    GROUP BY label, at_ns
), long AS (
    UNPIVOT wide ON COLUMNS('[.]|unknown') INTO NAME step VALUE found
)
SELECT
    label,
    at_ns,
    step,
    class,
    found.requests * $one_in AS requests,
    round(100 * found.ns / all_ns, 2) AS share_percent,
    round(found.percentiles[1] / 1e6, 3) AS p50_ms,
    round(found.percentiles[2] / 1e6, 3) AS p90_ms,
    round(found.percentiles[3] / 1e6, 3) AS p99_ms,
    $one_in AS one_in
FROM long
JOIN step_classes USING (step)
WHERE found.requests > 0
ORDER BY label, at_ns, share_percent DESC, step
