-- title: Engines
-- description: Every instrumented engine process, its identity and its fingerprint. Runs whose fingerprints differ
--   are not alike: compare them only when that is what you ask.
-- column engine: Engine id
-- column source: scheduler or worker
-- column rank: Worker rank
-- column host: Host name
-- column pid: Process id on that host
-- column label: Kind of traffic; empty is production
-- column state: recording, stopped (recorder gave up), ended (nothing in flight), gone (died)
-- column state_detail: Why it stopped
-- column kvscope: kvscope version in the engine
-- column hooks_missing: Hooks that this vLLM lacks: their steps are unknown
-- column started_at: When its ring was made, UTC
-- column fingerprint: Versions, model, connector and its settings, sizes, cache policy (JSON)
SELECT
    engine,
    source,
    rank,
    host,
    pid,
    label,
    state,
    state_detail,
    kvscope,
    hooks_missing,
    strftime(make_timestamp_ns(started_at_ns), '%Y-%m-%d %H:%M:%S') AS started_at,
    fingerprint
FROM engines
ORDER BY started_at_ns DESC, engine, source, rank
