-- title: Leases
-- description: Blocks kept for the peer: how the leases ended, and what was left until the deadline. An expired lease
--   whose peer reads all the same is an outcome detail of the request (question outcomes: read_after_expiry).
-- column engine: Engine that kept the blocks
-- column lease_end: released, expired, lost (engine gone); NULL while it runs
-- column leases: Leases
-- column renewed: Of these: a heartbeat moved the deadline at least once
-- column p50_held_ms: Median time they were held, ms
-- column min_margin_ms: Least time left until the deadline at the end, ms; negative is past it
-- column p50_margin_ms: Median time left until the deadline at the end, ms
-- column first_at: When the first began, UTC
-- column last_at: When the last began, UTC
SELECT
    engine,
    "end" AS lease_end,
    count(*) AS leases,
    count(*) FILTER (renewals > 0) AS renewed,
    round(quantile_cont(ended_at_ns - armed_at_ns, 0.5) / 1e6, 3) AS p50_held_ms,
    round(min(deadline_at_ns - ended_at_ns) / 1e6, 3) AS min_margin_ms,
    round(quantile_cont(deadline_at_ns - ended_at_ns, 0.5) / 1e6, 3) AS p50_margin_ms,
    strftime(make_timestamp_ns(min(armed_at_ns)), '%Y-%m-%d %H:%M:%S') AS first_at,
    strftime(make_timestamp_ns(max(armed_at_ns)), '%Y-%m-%d %H:%M:%S') AS last_at
FROM leases
GROUP BY engine, "end"
ORDER BY leases DESC, engine, lease_end
