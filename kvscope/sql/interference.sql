-- title: Decoding and prefill while KV was moved
-- description: Do transfers slow the engines down? Generation on D is judged by the transfers that touched D in the
--   quarter of a second after the one in which the first token came out (requests that had ended by its end are left
--   out), prefill on P by those that touched P in the quarter before the one in which it began. So neither meets its
--   own transfer, nor more transfers because it is slow for another reason. A transfer counts from its post call until
--   the poll that saw it done. More transfers also mean more load and larger batches: compare at like load
--   (coordination_load) before blaming the transfers.
-- column label: Kind of traffic; empty is production
-- column side: decode (generation on D) or prefill (prefill.compute on P, without requests that read KV back)
-- column transfers: Transfers in flight at the engine in that span: none, 1, 2 to 3, 4 or more
-- column requests: Requests
-- column p50_ms_per_token: Median time per token, ms: after the first one on D (TPOT), per computed token on P
-- column p90_ms_per_token: 90th percentile of the same, ms
-- column mean_ms_per_token: Mean of the same, ms
-- column slower_percent: How much higher the median is than that of `none`, percent; NULL where none is known
WITH moves AS (
    -- The quarters of a second that each transfer touches, at most a minute of them.
    SELECT
        engine,
        peer,
        (posted_at_ns - coalesce(post_ns, 0)) // 250_000_000 AS first,
        least((posted_at_ns + coalesce(wire_upper_ns, 0)) // 250_000_000, first + 240) AS last
    FROM transfers
), touched AS (
    SELECT engine, quarter, count(*) AS transfers
    FROM (
        SELECT engine, unnest(range(first, last + 1)) AS quarter FROM moves
        UNION ALL
        SELECT peer, unnest(range(first, last + 1)) FROM moves
    )
    GROUP BY engine, quarter
), spans AS (
    SELECT
        label,
        'decode' AS side,
        d_engine AS engine,
        (arrived_at_ns + ttft_ns) // 250_000_000 + 1 AS quarter,
        decode_generate_ns / (output_tokens - 1) AS ns_per_token
    FROM requests
    WHERE
        output_tokens > 1
        AND d_engine IS NOT NULL
        AND arrived_at_ns + ttft_ns + decode_generate_ns >= (quarter + 1) * 250_000_000
    UNION ALL
    SELECT
        label,
        'prefill' AS side,
        p_engine AS engine,
        (
            arrived_at_ns + coalesce(prefill_frontend_ns, 0) + coalesce(prefill_queue_ns, 0)
            + coalesce(prefill_blocks_ns, 0)
        ) // 250_000_000 - 1 AS quarter,
        prefill_compute_ns / (prompt_tokens - coalesce(p_cached_tokens, 0)) AS ns_per_token
    FROM requests
    WHERE
        prefill_compute_ns > 0
        AND prompt_tokens > coalesce(p_cached_tokens, 0)
        AND coalesce(reuse_pulled_tokens, 0) = 0
        AND p_engine IS NOT NULL
        AND ttft_ns IS NOT NULL
), grouped AS (
    SELECT
        label,
        side,
        CASE WHEN transfers IS NULL THEN 1 WHEN transfers = 1 THEN 2 WHEN transfers < 4 THEN 3 ELSE 4 END AS place,
        count(*) AS requests,
        quantile_cont(ns_per_token, 0.5) AS p50,
        quantile_cont(ns_per_token, 0.9) AS p90,
        avg(ns_per_token) AS mean
    FROM spans
    LEFT JOIN touched USING (engine, quarter)
    WHERE (quarter + 1) * 250_000_000 <= $until
    GROUP BY label, side, place
)
SELECT
    label,
    side,
    ['none', '1', '2 to 3', '4 or more'][place] AS transfers,
    requests,
    round(p50 / 1e6, 4) AS p50_ms_per_token,
    round(p90 / 1e6, 4) AS p90_ms_per_token,
    round(mean / 1e6, 4) AS mean_ms_per_token,
    CASE
        WHEN first_value(place) OVER of_side = 1
            THEN round(100 * (p50 / nullif(first_value(p50) OVER of_side, 0) - 1), 2)
    END AS slower_percent
FROM grouped
WINDOW of_side AS (PARTITION BY label, side ORDER BY place)
ORDER BY label, side, place
