-- title: What was not recorded
-- description: Rings with events lost, damaged or not understood, hooks missing in this vLLM, and recorders that
--   gave up. Empty when nothing is missing. Requests that were not joined are in the question `outcomes`.
-- column engine: Engine id
-- column source: scheduler or worker
-- column rank: Worker rank
-- column events: Events read
-- column lost: Events overwritten before they were read, or torn
-- column lost_percent: Lost of all
-- column torn: Of the lost: damaged slots
-- column rejected: Events read and not understood
-- column hooks_missing: Hooks that this vLLM lacks
-- column state: recording, stopped, ended or gone
-- column state_detail: Why it stopped
-- column ring: Ring id
SELECT
    engine,
    source,
    rank,
    "read"::BIGINT AS events,
    lost::BIGINT AS lost,
    round(100 * engines.lost / nullif("read" + engines.lost, 0), 3) AS lost_percent,
    torn::BIGINT AS torn,
    rejected::BIGINT AS rejected,
    hooks_missing,
    state,
    state_detail,
    ring
FROM engines
WHERE engines.lost > 0 OR engines.rejected > 0 OR len(hooks_missing) > 0 OR state IN ('stopped', 'gone')
ORDER BY lost DESC, rejected DESC, engine, source, rank
