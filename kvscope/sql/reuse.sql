-- title: Reuse of KV kept on D (bidirectional)
-- description: What became of the KV that D had kept for a later turn, and whether reading it back paid: the net
--   benefit is the prefill saved, at P's own median cost per computed token of that model, minus the wait added.
-- column label: Kind of traffic; empty is production
-- column reuse_outcome: pulled, below threshold, expired, metadata missing, local hit or failed
-- column p_engine: Prefill engine
-- column model: Model
-- column requests: Requests for which KV was offered
-- column offered_tokens: Tokens that D had kept for them
-- column pulled_tokens: Tokens that P read back
-- column skipped_tokens: Tokens offered and not read back
-- column p50_ttft_ms: Median TTFT, ms
-- column mean_wait_added_ms: Mean time in the prefill.reuse_* steps, ms
-- column us_per_token: P's median prefill cost per computed token of the model, us
-- column cost_requests: Requests of the label that this is the median of
-- column mean_net_benefit_ms: Mean of prefill saved minus wait added, ms; NULL where nothing was pulled or the cost is not known
WITH cost AS (
    SELECT
        label,
        p_engine,
        model,
        count(*) AS cost_requests,
        quantile_cont(
            prefill_compute_ns
            / (prompt_tokens - coalesce(p_cached_tokens, 0) - coalesce(reuse_pulled_tokens, 0)), 0.5
        ) AS ns_per_token
    FROM requests
    WHERE
        prefill_compute_ns > 0
        AND prompt_tokens - coalesce(p_cached_tokens, 0) - coalesce(reuse_pulled_tokens, 0) > 0
    GROUP BY label, p_engine, model
), priced AS (
    SELECT
        r.*,
        c.cost_requests,
        c.ns_per_token,
        coalesce(list_sum([
            prefill_reuse_dispatch_ns, prefill_reuse_handshake_ns, prefill_reuse_post_ns, prefill_reuse_wire_ns,
            prefill_reuse_detect_ns, prefill_reuse_report_ns, prefill_reuse_promote_ns, prefill_reuse_admit_ns
        ]), 0) AS added_ns,
        CASE WHEN reuse_outcome = 'pulled' THEN reuse_pulled_tokens * c.ns_per_token END AS saved_ns,
        saved_ns - added_ns AS net_ns
    FROM requests AS r
    LEFT JOIN cost AS c
        ON c.p_engine = r.p_engine
        AND c.label IS NOT DISTINCT FROM r.label
        AND c.model IS NOT DISTINCT FROM r.model
)
SELECT
    label,
    reuse_outcome,
    p_engine,
    model,
    count(*) AS requests,
    sum(reuse_offered_tokens)::BIGINT AS offered_tokens,
    coalesce(sum(reuse_pulled_tokens), 0)::BIGINT AS pulled_tokens,
    sum(reuse_offered_tokens - coalesce(reuse_pulled_tokens, 0))::BIGINT AS skipped_tokens,
    round(quantile_cont(ttft_ns, 0.5) / 1e6, 3) AS p50_ttft_ms,
    round(avg(added_ns) / 1e6, 3) AS mean_wait_added_ms,
    round(any_value(ns_per_token) / 1e3, 3) AS us_per_token,
    any_value(cost_requests) AS cost_requests,
    round(avg(net_ns) / 1e6, 3) AS mean_net_benefit_ms
FROM priced
WHERE reuse_outcome IS NOT NULL
GROUP BY label, reuse_outcome, p_engine, model
ORDER BY label, requests DESC, reuse_outcome, p_engine, model
