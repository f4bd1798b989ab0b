-- title: NIXL handshakes
-- description: Each engine's handshakes with each peer: the first request of a new pair pays for one, and requests
--   for other peers wait behind it.
-- column engine: Engine that asked
-- column peer: Engine that answered
-- column handshakes: Handshakes
-- column failed: Of these: not connected
-- column p50_ms: Median duration, ms
-- column max_ms: Longest, ms
-- column clock_offset_ms: Median of the peer's clock minus ours as vLLM estimated it, ms; NULL when it did not
-- column last_at: Start of the last, UTC
SELECT
    engine,
    peer,
    count(*) AS handshakes,
    count(*) FILTER (NOT ok) AS failed,
    round(quantile_cont(ns, 0.5) / 1e6, 3) AS p50_ms,
    round(max(ns) / 1e6, 3) AS max_ms,
    round(quantile_cont(clock_offset_ns, 0.5) / 1e6, 3) AS clock_offset_ms,
    strftime(make_timestamp_ns(max(started_at_ns)), '%Y-%m-%d %H:%M:%S') AS last_at
FROM handshakes
GROUP BY engine, peer
ORDER BY failed DESC, max_ms DESC, engine, peer
