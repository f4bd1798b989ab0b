-- title: Outcomes
-- description: What came of the requests, how their legs were joined, and what went wrong without an error:
--   prompts computed twice, and KV that may have been read after its lease had expired.
-- column label: Kind of traffic; empty is production
-- column connector: push, pull, bidirectional or local
-- column outcome: finished, aborted, error, ignored, lost (engine gone), incomplete (quiet), or, asked of a daemon,
--   in flight: not over, and its first token is out
-- column detail: vLLM's status or failure type
-- column step: Step in which those are, or were last seen, that did not finish
-- column joined_by: How the legs were joined, or why not
-- column requests: Requests
-- column recomputed: Of these: D computed prompt tokens that P had
-- column recomputed_tokens: Such tokens
-- column read_after_expiry: Of these: D's completion came after the lease had expired: it may have read other KV
-- column first_at: Arrival of the first, UTC
-- column last_at: Arrival of the last, UTC
SELECT
    label,
    connector,
    outcome,
    outcome_detail AS detail,
    current_step AS step,
    joined_by,
    count(*) AS requests,
    count(*) FILTER (recomputed_tokens > 0) AS recomputed,
    coalesce(sum(recomputed_tokens), 0)::BIGINT AS recomputed_tokens,
    count(*) FILTER (read_after_expiry) AS read_after_expiry,
    strftime(make_timestamp_ns(min(arrived_at_ns)), '%Y-%m-%d %H:%M:%S') AS first_at,
    strftime(make_timestamp_ns(max(arrived_at_ns)), '%Y-%m-%d %H:%M:%S') AS last_at
FROM requests
GROUP BY label, connector, outcome, outcome_detail, current_step, joined_by
ORDER BY label, requests DESC, connector, outcome, detail
