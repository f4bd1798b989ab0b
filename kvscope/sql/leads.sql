-- title: Leads and lags
-- description: How much earlier than the end of prefill the decode side was ready. Under push a lead is what the
--   connector buys; a lag (negative lead) is what a sequential router or a late registration wastes.
-- column label: Kind of traffic; empty is production
-- column connector: push, pull or bidirectional
-- column p_engine: Prefill engine
-- column d_engine: Decode engine
-- column requests: Requests with a known lead
-- column lagging: Of these: decode side ready after prefill had finished
-- column p10_lead_ms: 10th percentile of the lead, ms
-- column p50_lead_ms: Median lead, ms
-- column p90_lead_ms: 90th percentile of the lead, ms
-- column mean_lag_ms: Mean lag over all requests (a lead counts as 0), ms
SELECT
    label,
    connector,
    p_engine,
    d_engine,
    count(*) AS requests,
    count(*) FILTER (lead_ns < 0) AS lagging,
    round(quantile_cont(lead_ns, 0.1) / 1e6, 3) AS p10_lead_ms,
    round(quantile_cont(lead_ns, 0.5) / 1e6, 3) AS p50_lead_ms,
    round(quantile_cont(lead_ns, 0.9) / 1e6, 3) AS p90_lead_ms,
    round(avg(greatest(-lead_ns, 0)) / 1e6, 3) AS mean_lag_ms
FROM requests
WHERE lead_ns IS NOT NULL
GROUP BY label, connector, p_engine, d_engine
ORDER BY label, connector, mean_lag_ms DESC, p_engine, d_engine
