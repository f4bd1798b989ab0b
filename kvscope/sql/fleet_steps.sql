-- title: Steps of the fleet
-- description: What each step takes of all TTFT, over all connectors, the largest first. Of a million requests and
--   more an even sample is looked at: one_in says so.
-- column label: Kind of traffic; empty is production
-- column step: Step on the critical path
-- column class: compute, capacity, transfer, coordination or unknown
-- column requests: Requests that spent time in it
-- column share_percent: Its part of all TTFT
-- column mean_ms: Mean over all requests, those without it counted as 0, ms
-- column p50_ms: Median over the requests that had it, ms
-- column p90_ms: 90th percentile over the requests that had it, ms
-- column p99_ms: 99th percentile over the requests that had it, ms
-- column one_in: One in so many requests was looked at; 1 is all of them, and then the figures are exact
WITH wide AS (
    -- A column per step, whose names have a dot but for `unknown`: a row per request and step would be too many.
    SELECT
        label,
        count(*) AS all_requests,
        sum(ttft)::DOUBLE AS all_ns,
        {
            requests: count(nullif(COLUMNS('[.]|unknown'), 0)),
            ns: sum(COLUMNS('[.]|unknown')),
            percentiles: quantile_cont(nullif(COLUMNS('[.]|unknown'), 0), [0.5, 0.9, 0.99])
        }
    FROM step_values
    WHERE id % $one_in::UBIGINT = 0
    GROUP BY label
), long AS (
    UNPIVOT wide ON COLUMNS('[.]|unknown') INTO NAME step VALUE found
)
SELECT
    label,
    step,
    class,
    found.requests * $one_in AS requests,
    round(100 * found.ns / all_ns, 2) AS share_percent,
    round(found.ns / all_requests / 1e6, 3) AS mean_ms,
    round(found.percentiles[1] / 1e6, 3) AS p50_ms,
    round(found.percentiles[2] / 1e6, 3) AS p90_ms,
    round(found.percentiles[3] / 1e6, 3) AS p99_ms,
    $one_in AS one_in
FROM long
JOIN step_classes USING (step)
WHERE found.requests > 0
ORDER BY label, found.ns DESC, step
