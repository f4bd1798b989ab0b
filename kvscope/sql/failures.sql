-- title: Failures
-- description: What vLLM's connector logged as failed, kvscope hooks that raised, and recorders that stopped.
-- parameters: limit
-- column kind: nixl, hook or recorder
-- column name: vLLM's failure type, or the hook's name
-- column engine: Engine
-- column source: scheduler or worker
-- column failures: How many
-- column requests: Requests that were hit, as far as known
-- column last_detail: The exception or the peer of the last one
-- column first_at: First, UTC
-- column last_at: Last, UTC
SELECT
    kind,
    name,
    engine,
    source,
    count(*) AS failures,
    count(DISTINCT request_id) AS requests,
    arg_max(detail, at_ns) AS last_detail,
    strftime(make_timestamp_ns(min(at_ns)), '%Y-%m-%d %H:%M:%S') AS first_at,
    strftime(make_timestamp_ns(max(at_ns)), '%Y-%m-%d %H:%M:%S') AS last_at
FROM failures
GROUP BY kind, name, engine, source
ORDER BY max(at_ns) DESC, kind, name, engine
LIMIT $limit
