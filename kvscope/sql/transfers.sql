-- title: NIXL transfers
-- description: Rate, descriptors and cost of posting for each engine, peer and operation, per transfer (one rank
--   each). A slow READ beside a fast WRITE, many small descriptors, or a long post each have a cure of their own.
-- column operation: READ (pull, reuse) or WRITE (push)
-- column engine: Engine that posted them
-- column peer: The other engine
-- column transfers: Transfers
-- column failed: Of these: failed
-- column still_open: Of these: posted, and never seen done
-- column bytes: Bytes moved
-- column p50_bytes: Median size, bytes
-- column p50_descriptors: Median number of descriptors
-- column p50_bytes_per_descriptor: Median size of a descriptor, bytes
-- column p50_post_ms: Median time in the post call, ms
-- column us_per_descriptor: Post time per descriptor, us
-- column p50_wire_lower_ms: Median of the least time on the wire, ms
-- column p50_wire_upper_ms: Median of the most time on the wire, ms
-- column p50_gb_per_s: Median of bytes over the time in the post call and the most time on the wire (a lower bound)
-- column best_gb_per_s: Fastest such rate
-- column p50_telemetry_ms: Median of NIXL's own duration, ms; it ends at the poll, not on the wire
SELECT
    operation,
    engine,
    peer,
    count(*) AS transfers,
    count(*) FILTER (state = 'failed') AS failed,
    count(*) FILTER (state = 'open') AS still_open,
    sum(bytes)::BIGINT AS bytes,
    quantile_cont(bytes, 0.5)::BIGINT AS p50_bytes,
    quantile_cont(descriptors, 0.5)::BIGINT AS p50_descriptors,
    quantile_cont(bytes / nullif(descriptors, 0), 0.5)::BIGINT AS p50_bytes_per_descriptor,
    round(quantile_cont(post_ns, 0.5) / 1e6, 3) AS p50_post_ms,
    round(sum(post_ns) / nullif(sum(descriptors), 0) / 1e3, 3) AS us_per_descriptor,
    round(quantile_cont(wire_lower_ns, 0.5) / 1e6, 3) AS p50_wire_lower_ms,
    round(quantile_cont(wire_upper_ns, 0.5) / 1e6, 3) AS p50_wire_upper_ms,
    round(quantile_cont(bytes / nullif(post_ns + wire_upper_ns, 0), 0.5), 3) AS p50_gb_per_s,
    round(max(bytes / nullif(post_ns + wire_upper_ns, 0)), 3) AS best_gb_per_s,
    round(quantile_cont(telemetry_xfer_us, 0.5) / 1e3, 3) AS p50_telemetry_ms
FROM transfers
GROUP BY operation, engine, peer
ORDER BY transfers DESC, operation, engine, peer
