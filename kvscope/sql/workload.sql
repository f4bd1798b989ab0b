-- title: Workload
-- description: What was asked of the engines, to see whether two windows are alike before their figures are compared:
--   rate, lengths, caches and reuse, connectors, models and engines.
-- column label: Kind of traffic; empty is production
-- column requests: Requests, those without a first token too
-- column requests_per_s: Requests per second, from since to until; without since, from first to last arrival
-- column p50_prompt_tokens: Median prompt length, tokens
-- column p90_prompt_tokens: 90th percentile of the prompt length, tokens
-- column p50_output_tokens: Median number of tokens generated
-- column p90_output_tokens: 90th percentile of the number of tokens generated
-- column p_cached_percent: Prompt tokens that P took from its own prefix cache, of those known
-- column d_cached_percent: Prompt tokens that D took from its own prefix cache, of those known
-- column reuse_offered_percent: Requests for which D had kept KV (bidirectional)
-- column reuse_pulled_percent: Of the tokens so offered: P read them back; NULL where none was offered
-- column p50_in_flight: Median, over the seconds with an arrival, of the requests in flight at their beginning
-- column connectors: Requests by connector, the most frequent first, such as push 120, local 3
-- column models: Requests by model
-- column pairs: Pairs of P and D engine with requests
-- column p_engines: Engine ids of P
-- column d_engines: Engine ids of D
WITH span AS (
    SELECT
        (CASE WHEN $since > 0 THEN $until - $since ELSE max(arrived_at_ns) - min(arrived_at_ns) END) / 1e9 AS seconds
    FROM requests
), changes AS (
    SELECT label, arrived_at_ns // 1_000_000_000 AS second, count(*) AS arrived, 0 AS ended
    FROM requests
    WHERE ttft_ns IS NOT NULL
    GROUP BY ALL
    UNION ALL
    SELECT label, (arrived_at_ns + ttft_ns + coalesce(decode_generate_ns, 0)) // 1_000_000_000 AS second, 0, count(*)
    FROM requests
    WHERE ttft_ns IS NOT NULL AND (decode_generate_ns IS NOT NULL OR outcome IS DISTINCT FROM 'in flight')
    GROUP BY ALL
), seconds AS (
    SELECT
        label,
        sum(arrived) AS arrived,
        (
            sum(sum(arrived) - sum(ended)) OVER (PARTITION BY label ORDER BY second) - (sum(arrived) - sum(ended))
        )::BIGINT AS in_flight
    FROM changes
    GROUP BY label, second
), load AS (
    SELECT label, quantile_cont(in_flight, 0.5) AS in_flight
    FROM seconds
    WHERE arrived > 0
    GROUP BY label
), connectors AS (
    SELECT label, string_agg(coalesce(connector, '?') || ' ' || n, ', ' ORDER BY n DESC, connector) AS texts
    FROM (SELECT label, connector, count(*) AS n FROM requests GROUP BY ALL)
    GROUP BY label
), models AS (
    SELECT label, string_agg(coalesce(model, '?') || ' ' || n, ', ' ORDER BY n DESC, model) AS texts
    FROM (SELECT label, model, count(*) AS n FROM requests GROUP BY ALL)
    GROUP BY label
)
SELECT
    r.label,
    count(*) AS requests,
    round(count(*) / nullif(any_value(span.seconds), 0), 3) AS requests_per_s,
    round(quantile_cont(prompt_tokens, 0.5), 1) AS p50_prompt_tokens,
    round(quantile_cont(prompt_tokens, 0.9), 1) AS p90_prompt_tokens,
    round(quantile_cont(output_tokens, 0.5), 1) AS p50_output_tokens,
    round(quantile_cont(output_tokens, 0.9), 1) AS p90_output_tokens,
    round(
        100 * sum(p_cached_tokens) / nullif(sum(prompt_tokens) FILTER (p_cached_tokens IS NOT NULL), 0), 2
    ) AS p_cached_percent,
    round(
        100 * sum(d_cached_tokens) / nullif(sum(prompt_tokens) FILTER (d_cached_tokens IS NOT NULL), 0), 2
    ) AS d_cached_percent,
    round(100 * count(reuse_outcome) / count(*), 2) AS reuse_offered_percent,
    round(
        100 * sum(coalesce(reuse_pulled_tokens, 0)) FILTER (reuse_outcome IS NOT NULL)
        / nullif(sum(reuse_offered_tokens), 0), 2
    ) AS reuse_pulled_percent,
    any_value(load.in_flight) AS p50_in_flight,
    any_value(connectors.texts) AS connectors,
    any_value(models.texts) AS models,
    count(DISTINCT (p_engine, d_engine)) FILTER (p_engine IS NOT NULL AND d_engine IS NOT NULL) AS pairs,
    list_sort(list_distinct(list(DISTINCT p_engine))) AS p_engines,
    list_sort(list_distinct(list(DISTINCT d_engine))) AS d_engines
FROM requests AS r
CROSS JOIN span
LEFT JOIN load ON r.label IS NOT DISTINCT FROM load.label
LEFT JOIN connectors ON r.label IS NOT DISTINCT FROM connectors.label
LEFT JOIN models ON r.label IS NOT DISTINCT FROM models.label
GROUP BY r.label
ORDER BY r.label
