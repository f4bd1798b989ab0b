-- title: Sessions
-- description: Conversations whose turns are chained by a reuse of KV that D had kept: how much was read back, and the
--   time between turns against the time that D keeps it. The latest session first.
-- parameters: limit
-- column session: Id of its first request
-- column label: Kind of traffic of the last turn; empty is production
-- column model: Model of the last turn
-- column p_engine: Prefill engine of the last turn
-- column d_engine: Decode engine of the last turn
-- column turns: Turns that were seen
-- column first_at: Arrival of the first of these, UTC
-- column last_at: Arrival of the last, UTC
-- column last_id: Id of the last turn's request; explain takes it
-- column prompt_tokens: Prompt tokens of the last turn
-- column reuse_offered_tokens: Tokens whose KV D had kept, over all turns
-- column reuse_pulled_tokens: Tokens that P read back, over all turns
-- column recomputed_tokens: Prompt tokens that D computed although P had, over all turns
-- column outcomes: What became of the KV that was offered, such as "pulled 3, expired 1"; empty where none was
-- column p50_pause_ms: Median time from the end of a turn to the arrival of the next, of turns that were both
--   seen, ms
-- column max_pause_ms: Longest such time, ms
-- column ttl_ms: Median time from the beginning of D's leases to their last deadline, ms; NULL when not known
-- column p50_ttft_ms: Median TTFT, ms
WITH latest AS (
    SELECT session
    FROM requests
    WHERE session IS NOT NULL
    GROUP BY session
    ORDER BY max(arrived_at_ns) DESC, session
    LIMIT $limit
), turns AS (
    SELECT
        *,
        CASE WHEN lead(turn) OVER in_order = turn + 1 THEN
            lead(arrived_at_ns) OVER in_order - (arrived_at_ns + ttft_ns + decode_generate_ns)
        END AS pause_ns
    FROM requests
    SEMI JOIN latest USING (session)
    WINDOW in_order AS (PARTITION BY session ORDER BY arrived_at_ns, id)
), outcomes AS (
    SELECT session, string_agg(reuse_outcome || ' ' || n, ', ' ORDER BY n DESC, reuse_outcome) AS outcomes
    FROM (SELECT session, reuse_outcome, count(*) AS n FROM turns WHERE reuse_outcome IS NOT NULL GROUP BY ALL)
    GROUP BY session
), kept AS (
    SELECT t.session, quantile_cont(l.deadline_at_ns - l.armed_at_ns, 0.5) AS ttl_ns
    FROM leases AS l
    JOIN turns AS t ON l.request_id = t.id AND l.engine = t.d_engine
    GROUP BY t.session
)
SELECT
    t.session,
    arg_max(label, arrived_at_ns) AS label,
    arg_max(model, arrived_at_ns) AS model,
    arg_max(p_engine, arrived_at_ns) AS p_engine,
    arg_max(d_engine, arrived_at_ns) AS d_engine,
    count(*) AS turns,
    strftime(make_timestamp_ns(min(arrived_at_ns)), '%Y-%m-%d %H:%M:%S') AS first_at,
    strftime(make_timestamp_ns(max(arrived_at_ns)), '%Y-%m-%d %H:%M:%S') AS last_at,
    arg_max(id, arrived_at_ns) AS last_id,
    arg_max(prompt_tokens, arrived_at_ns) AS prompt_tokens,
    coalesce(sum(reuse_offered_tokens), 0)::BIGINT AS reuse_offered_tokens,
    coalesce(sum(reuse_pulled_tokens), 0)::BIGINT AS reuse_pulled_tokens,
    coalesce(sum(recomputed_tokens), 0)::BIGINT AS recomputed_tokens,
    coalesce(any_value(o.outcomes), '') AS outcomes,
    round(quantile_cont(pause_ns, 0.5) / 1e6, 3) AS p50_pause_ms,
    round(max(pause_ns) / 1e6, 3) AS max_pause_ms,
    round(any_value(k.ttl_ns) / 1e6, 3) AS ttl_ms,
    round(quantile_cont(ttft_ns, 0.5) / 1e6, 3) AS p50_ttft_ms
FROM turns AS t
LEFT JOIN outcomes AS o ON o.session = t.session
LEFT JOIN kept AS k ON k.session = t.session
GROUP BY t.session
ORDER BY max(arrived_at_ns) DESC, t.session
