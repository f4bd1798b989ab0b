-- title: Percentiles with their confidence
-- description: TTFT, its classes and steps, and the time per output token, each with 95 % confidence intervals that
--   rest on order statistics, so on no assumption about the distribution: what two windows are compared by. All
--   requests with a first token count, those that did not have a step as 0. Where a connector has more than 40,000
--   requests, an even sample of them is looked at (one_in says so), and the intervals are those of the sample.
-- column label: Kind of traffic; empty is production
-- column connector: push, pull, bidirectional or local
-- column part: ttft, a class (compute, capacity, transfer, coordination, unknown), a step, or tpot: the time per output
--   token after the first, of requests with more than one
-- column class: Class of the part; NULL for ttft and tpot
-- column requests: Requests of the sample
-- column mean_ms: Mean, ms
-- column p50_ms: Median, ms
-- column p50_low_ms: Lower end of its interval, ms
-- column p50_high_ms: Upper end, ms
-- column p90_ms: 90th percentile, ms
-- column p90_low_ms: Lower end of its interval, ms
-- column p90_high_ms: Upper end, ms
-- column p99_ms: 99th percentile, ms
-- column p99_low_ms: Lower end of its interval, ms
-- column p99_high_ms: Upper end, ms; the maximum where there are too few requests for more
-- column one_in: One in so many requests was looked at; 1 is all of them
WITH counted AS (
    SELECT label, connector, greatest(1, count(*) // 20_000)::UBIGINT AS one_in
    FROM requests
    WHERE ttft_ns IS NOT NULL
    GROUP BY label, connector
), sampled AS (
    SELECT s.* EXCLUDE (id, arrived_at_ns), one_in
    FROM step_values AS s
    JOIN counted AS c ON s.label IS NOT DISTINCT FROM c.label AND s.connector IS NOT DISTINCT FROM c.connector
    WHERE id % one_in = 0
), wide AS (
    -- A column per part: its values in order, 0 where a request did not have it.
    SELECT
        label,
        connector,
        one_in,
        list_sort(list(coalesce(COLUMNS(* EXCLUDE (label, connector, one_in, tpot)), 0))),
        list_sort(list(tpot) FILTER (tpot IS NOT NULL)) AS tpot
    FROM sampled
    GROUP BY label, connector, one_in
), long AS (
    UNPIVOT wide ON COLUMNS(* EXCLUDE (label, connector, one_in)) INTO NAME part VALUE ordered
), placed AS (
    -- Each percentile and the ends of its interval: where they are in that order, from 1.
    SELECT
        *,
        len(ordered) AS requests,
        list_transform(
            [
                [0.5, 0], [0.5, -1.96], [0.5, 1.96],
                [0.9, 0], [0.9, -1.96], [0.9, 1.96],
                [0.99, 0], [0.99, -1.96], [0.99, 1.96]
            ],
            lambda q: 1 + (requests - 1) * greatest(0, least(1, q[1] + q[2] * sqrt(q[1] * (1 - q[1]) / requests)))
        ) AS places
    FROM long
), neighbours AS (
    SELECT
        * EXCLUDE (ordered),
        list_sum(ordered) / requests AS mean_ns,
        list_select(ordered, list_transform(places, lambda place: floor(place)::BIGINT)) AS below,
        list_select(ordered, list_transform(places, lambda place: ceil(place)::BIGINT)) AS above
    FROM placed
), found AS (
    -- Between two requests in proportion, as quantile_cont has it.
    SELECT
        *,
        list_transform(
            range(1, 10),
            lambda i: round((below[i] + (above[i] - below[i]) * (places[i] - floor(places[i]))) / 1e6, 4)
        ) AS ms
    FROM neighbours
)
SELECT
    label,
    connector,
    part,
    CASE WHEN part IN ('compute', 'capacity', 'transfer', 'coordination') THEN part ELSE class END AS class,
    requests,
    round(mean_ns / 1e6, 4) AS mean_ms,
    ms[1] AS p50_ms,
    ms[2] AS p50_low_ms,
    ms[3] AS p50_high_ms,
    ms[4] AS p90_ms,
    ms[5] AS p90_low_ms,
    ms[6] AS p90_high_ms,
    ms[7] AS p99_ms,
    ms[8] AS p99_low_ms,
    ms[9] AS p99_high_ms,
    one_in::BIGINT AS one_in
FROM found
LEFT JOIN step_classes ON part = step
WHERE mean_ns > 0
ORDER BY label, connector, mean_ns DESC, part
