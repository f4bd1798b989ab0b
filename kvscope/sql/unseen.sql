-- title: What kvscope could not see
-- description: All that is missing from or uncertain in the other answers, one row per kind, those found first. What is
--   about recorded events is of all engines of the label at all times, whatever the window; the rest is of the
--   requests that the question is about. A count of 0 is said, so that nothing missing is not taken for not looked at.
-- column label: Kind of traffic; empty is production
-- column kind: What is missing or uncertain
-- column count: How much: events, processes, requests or, of TTFT, milliseconds
-- column of: The same of all; NULL where that is not known
-- column share_percent: Count of all
-- column detail: The worst of it: an engine, the missing hooks, a bound
-- column meaning: What that does to the figures, and what to do
WITH of_engines AS (
    SELECT coalesce(label, '') AS label, kind, sum(n)::BIGINT AS n, sum(total)::BIGINT AS total, max_by(detail, n) FILTER (n > 0) AS detail, meaning
    FROM (
        SELECT
            label,
            unnest([
                {
                    kind: 'events lost', n: "lost"::BIGINT, total: ("read" + "lost")::BIGINT, detail: engine || ' ' || source,
                    meaning: 'overwritten in the ring before they were read: steps are unknown; larger ring (KVSCOPE_RING_SLOTS)'
                },
                {
                    kind: 'events torn', n: torn::BIGINT, total: ("read" + "lost")::BIGINT, detail: engine || ' ' || source,
                    meaning: 'damaged in the ring, counted among the lost; many: see docs/ring.md'
                },
                {
                    kind: 'events rejected', n: rejected::BIGINT, total: ("read" + "lost")::BIGINT,
                    detail: engine || ' ' || source,
                    meaning: 'read and not understood: engine and collector run other versions of kvscope'
                },
                {
                    kind: 'hooks missing', n: (len(hooks_missing) > 0)::BIGINT, total: 1,
                    detail: engine || ' ' || source || ': ' || array_to_string(hooks_missing, ', '),
                    meaning: 'processes whose vLLM lacks something kvscope hooks: its steps are unknown'
                },
                {
                    kind: 'recorders stopped', n: (state = 'stopped')::BIGINT, total: 1,
                    detail: engine || ' ' || source || ': ' || coalesce(state_detail, ''),
                    meaning: 'processes that gave up recording: nothing of them since; restart the engine'
                },
                {
                    kind: 'processes gone', n: (state = 'gone')::BIGINT, total: 1, detail: engine || ' ' || source,
                    meaning: 'processes that died: their requests in flight are lost'
                }
            ], recursive := true)
        FROM engines
        WHERE $label IS NULL OR coalesce(label, '') = $label
    )
    GROUP BY ALL
), of_requests AS (
    SELECT
        coalesce(label, '') AS label,
        unnest([
            {
                kind: 'legs not joined', n: count(*) FILTER (joined_by = 'unjoined'), total: count(*), detail: NULL,
                meaning: 'requests of which one leg never found its partner: half of their steps are unknown'
            },
            {
                kind: 'peer not instrumented', n: count(*) FILTER (joined_by = 'peer not instrumented'), total: count(*),
                detail: NULL, meaning: 'requests of which one leg was on an engine without kvscope'
            },
            {
                kind: 'joins inferred', n: count(*) FILTER (joined_by LIKE 'client id%'), total: count(*), detail: NULL,
                meaning: 'requests joined by the id that the client sent: wrong where a client uses one twice'
            },
            {
                kind: 'no first token', n: count(*) - count(ttft_ns), total: count(*), detail: NULL,
                meaning: 'requests that are in no figure of TTFT or its steps; the question stuck lists them'
            },
            {
                kind: 'TTFT unknown', n: ceil(sum(unknown_ns) FILTER (ttft_ns IS NOT NULL) / 1e6)::BIGINT,
                total: ceil(sum(ttft_ns) / 1e6)::BIGINT,
                detail: count(*) FILTER (unknown_ns > 0 AND ttft_ns IS NOT NULL) || ' requests',
                meaning: 'ms of TTFT between boundaries that were not observed'
            },
            {
                kind: 'wire not separated', n: count(*) FILTER (wire_lower_ns IS NOT NULL AND best_rate_bytes_per_s IS NULL),
                total: count(wire_lower_ns), detail: NULL,
                meaning: 'requests of pairs without a known rate: wire and readiness.detect can not be told apart'
            },
            {
                kind: 'boundaries moved', n: count(*) FILTER (clamped_ns > 0), total: count(*),
                detail: 'at most ' || round(max(clamped_ns) FILTER (clamped_ns > 0) / 1e6, 3) || ' ms',
                meaning: 'requests whose boundaries were out of order, as clocks of two hosts make them'
            },
            {
                kind: 'clocks uncertain', n: count(*) FILTER (clock_error_ns > 0), total: count(*),
                detail: 'at most ' || round(max(clock_error_ns) FILTER (clock_error_ns > 0) / 1e6, 3) || ' ms',
                meaning: 'requests across hosts: steps between the legs are known to within that bound'
            }
        ], recursive := true)
    FROM requests
    GROUP BY coalesce(label, '')
)
SELECT
    label,
    kind,
    coalesce(n, 0) AS count,
    total AS of,
    round(100 * coalesce(n, 0) / nullif(total, 0), 3) AS share_percent,
    CASE WHEN n > 0 THEN detail END AS detail,
    meaning
FROM (FROM of_engines UNION ALL FROM of_requests)
ORDER BY label, count > 0 DESC, share_percent DESC NULLS LAST, kind
