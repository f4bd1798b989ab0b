-- title: Stuck and lost
-- description: Requests that did not finish, and finished ones whose KV may have been read after its lease had
--   expired: in which step they were last seen, on which pair, and after how long. Asked of a daemon, also requests
--   that generate now; `kvscope requests --where 'outcome=in flight'` lists those that wait for their first token too.
-- column label: Kind of traffic; empty is production
-- column outcome: aborted, error, ignored, lost (engine gone), incomplete (quiet), in flight, or finished where the
--   KV was read late
-- column detail: vLLM's status or failure type
-- column step: Step in which they were last seen; NULL when finished
-- column connector: push, pull, bidirectional or local
-- column p_engine: Prefill engine, as far as known
-- column d_engine: Decode engine, as far as known
-- column joined_by: How the legs were joined, or why not
-- column requests: Requests
-- column without_first_token: Of these: the first token never came out
-- column read_after_expiry: Of these: D's completion came after the lease had expired: it may have read other KV
-- column p50_known_ms: Median time from arrival to the last boundary that was seen (at most the first token), ms
-- column max_known_ms: Longest such time, ms
-- column last_id: Id of the one that arrived last; explain takes it
-- column first_at: Arrival of the first, UTC
-- column last_at: Arrival of the last, UTC
WITH unfinished AS (
    SELECT
        *,
        coalesce(
            ttft_ns, compute_ns + capacity_ns + transfer_ns + coordination_ns + coalesce(unknown_ns, 0)
        ) AS known_ns
    FROM waits
    WHERE outcome IS DISTINCT FROM 'finished' OR read_after_expiry
)
SELECT
    label,
    outcome,
    outcome_detail AS detail,
    current_step AS step,
    connector,
    p_engine,
    d_engine,
    joined_by,
    count(*) AS requests,
    count(*) FILTER (ttft_ns IS NULL) AS without_first_token,
    count(*) FILTER (read_after_expiry) AS read_after_expiry,
    round(quantile_cont(known_ns, 0.5) / 1e6, 3) AS p50_known_ms,
    round(max(known_ns) / 1e6, 3) AS max_known_ms,
    arg_max(id, arrived_at_ns) AS last_id,
    strftime(make_timestamp_ns(min(arrived_at_ns)), '%Y-%m-%d %H:%M:%S') AS first_at,
    strftime(make_timestamp_ns(max(arrived_at_ns)), '%Y-%m-%d %H:%M:%S') AS last_at
FROM unfinished
GROUP BY ALL
ORDER BY label, requests DESC, outcome, step, p_engine, d_engine, detail, joined_by, connector
