-- title: Early-binding regret
-- description: Was another decode engine less loaded when prefill had finished than the one that was bound at
--   dispatch? What a request then waited for room on its D, minus what the requests that were handed over in the same
--   second waited on average on the least loaded of the other Ds (same label, model and connector); no regret is 0.
--   Seconds make it approximate, and it is at most what a router that knew the loads would save.
-- column label: Kind of traffic; empty is production
-- column connector: push, pull or bidirectional
-- column requests: Requests with both engines, a first token and no unknown time
-- column compared: Of these: another D was handed a request in the same second; the figures are of these
-- column regretted: Of these: regret above 0
-- column regretted_percent: The same, of those compared; NULL where none could be
-- column p50_regret_ms: Median regret, no regret counted as 0, ms; NULL where none could be compared
-- column p90_regret_ms: 90th percentile of the regret, ms
-- column max_regret_ms: Largest regret, ms
-- column total_regret_s: All regret together, s
-- column regret_percent: All regret together, of the TTFT of those compared
WITH ended AS (
    -- Step 11 is prefill.compute: its end is the hand-over, on the critical path or hidden behind a registration.
    -- Steps 13, 14 and 24 (registration.admit, registration.blocks, readiness.admit) are waits for room on D.
    SELECT
        label,
        model,
        connector,
        d_engine,
        arrived_at_ns,
        ttft_ns,
        list_max(
            list_transform(list_filter(waterfall, lambda i: i.step = 11), lambda i: i.from_ns + i.ns)
        ) AS handover_ns,
        list_filter(waterfall, lambda i: i.step IN (13, 14, 24)) AS waits
    FROM requests
    WHERE
        p_engine <> ''
        AND d_engine <> ''
        AND ttft_ns IS NOT NULL
        AND coalesce(unknown_ns, 0) = 0
        AND outcome IS DISTINCT FROM 'in flight'
), handed AS (
    SELECT
        label,
        model,
        connector,
        d_engine,
        ttft_ns,
        (arrived_at_ns + handover_ns) // 1_000_000_000 AS second,
        coalesce(list_sum(list_transform(
            list_filter(waits, lambda i: i.critical),
            lambda i: greatest(0, i.from_ns + i.ns - greatest(i.from_ns, handover_ns))
        )), 0) AS felt_ns,
        coalesce(list_sum(list_transform(waits, lambda i: i.ns)), 0) AS whole_ns
    FROM ended
    WHERE handover_ns IS NOT NULL
), loads AS (
    SELECT label, model, connector, second, d_engine, sum(whole_ns) // count(*) AS load_ns
    FROM handed
    GROUP BY ALL
), least AS (
    SELECT
        label,
        model,
        connector,
        second,
        min(load_ns) AS least_ns,
        min_by(d_engine, (load_ns, d_engine)) AS least_engine,
        list_sort(list(load_ns))[2] AS second_ns
    FROM loads
    GROUP BY ALL
    HAVING count(*) > 1
), judged AS (
    SELECT
        h.label,
        h.connector,
        h.ttft_ns,
        -- Not known, rather than 0, where there was no other D in that second.
        CASE
            WHEN least_ns IS NOT NULL
                THEN greatest(0, felt_ns - CASE WHEN d_engine = least_engine THEN second_ns ELSE least_ns END)
        END AS regret_ns
    FROM handed AS h
    LEFT JOIN least AS l
        ON h.second = l.second
        AND h.label IS NOT DISTINCT FROM l.label
        AND h.model IS NOT DISTINCT FROM l.model
        AND h.connector IS NOT DISTINCT FROM l.connector
)
SELECT
    label,
    connector,
    count(*) AS requests,
    count(regret_ns) AS compared,
    count(*) FILTER (regret_ns > 0) AS regretted,
    round(100 * regretted / nullif(compared, 0), 2) AS regretted_percent,
    round(quantile_cont(regret_ns, 0.5) / 1e6, 3) AS p50_regret_ms,
    round(quantile_cont(regret_ns, 0.9) / 1e6, 3) AS p90_regret_ms,
    round(max(regret_ns) / 1e6, 3) AS max_regret_ms,
    round(sum(regret_ns) / 1e9, 3) AS total_regret_s,
    round(100 * sum(regret_ns) / nullif(sum(ttft_ns) FILTER (regret_ns IS NOT NULL), 0), 2) AS regret_percent
FROM judged
GROUP BY label, connector
ORDER BY label, requests DESC, connector
