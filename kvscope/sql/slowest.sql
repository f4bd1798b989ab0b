-- title: Slowest requests
-- description: The requests with the longest TTFT, and where it went; `kvscope explain ID` tells the rest.
-- parameters: limit
-- column id: Id of the request; explain takes it
-- column client_id: The client's request id
-- column arrived: Arrival, UTC
-- column label: Kind of traffic; empty is production
-- column connector: push, pull, bidirectional or local
-- column outcome: What came of it
-- column ttft_ms: TTFT, ms
-- column compute_wait_ms: Compute and capacity, ms
-- column transfer_ms: Transfer, ms
-- column coordination_ms: Coordination wait, ms
-- column unknown_ms: Not observed, ms
-- column main_step: The longest step
-- column main_class: Its class: compute, capacity, transfer, coordination or unknown
-- column main_step_ms: Its duration, ms
-- column p_engine: Prefill engine
-- column d_engine: Decode engine
SELECT
    id,
    client_id,
    strftime(make_timestamp_ns(arrived_at_ns), '%Y-%m-%d %H:%M:%S.%g') AS arrived,
    label,
    connector,
    outcome,
    round(ttft_ns / 1e6, 3) AS ttft_ms,
    round(compute_wait_ns / 1e6, 3) AS compute_wait_ms,
    round(transfer_ns / 1e6, 3) AS transfer_ms,
    round(coordination_ns / 1e6, 3) AS coordination_ms,
    round(coalesce(unknown_ns, 0) / 1e6, 3) AS unknown_ms,
    main_step,
    main_class,
    round(main_step_ns / 1e6, 3) AS main_step_ms,
    p_engine,
    d_engine
FROM waits
WHERE ttft_ns IS NOT NULL
ORDER BY ttft_ns DESC, id
LIMIT $limit
