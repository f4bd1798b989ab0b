-- title: Reuse of KV kept on D (bidirectional)
-- description: What became of the KV that D had kept for a later turn, and whether reading it back paid:
--   net_benefit_ms is the prefill saved, at P's own median cost per computed token, minus the wait added.
-- column label: Kind of traffic; empty is production
-- column reuse_outcome: pulled, below threshold, expired, metadata missing, local hit or failed
-- column p_engine: Prefill engine
-- column requests: Requests for which KV was offered
-- column offered_tokens: Tokens that D had kept for them
-- column pulled_tokens: Tokens that P read back
-- column skipped_tokens: Tokens offered and not read back
-- column p50_ttft_ms: Median TTFT, ms
-- column mean_wait_added_ms: Mean time in the prefill.reuse_* steps, ms
-- column us_per_token: P's median prefill cost per computed token, us
-- column mean_net_benefit_ms: Mean of prefill saved minus wait added, ms; NULL where nothing was pulled
WITH cost AS (
    SELECT
        p_engine,
        quantile_cont(
            prefill_compute_ns
            / (prompt_tokens - coalesce(p_cached_tokens, 0) - coalesce(reuse_pulled_tokens, 0)), 0.5
        ) AS ns_per_token
    FROM requests
    WHERE
        prefill_compute_ns > 0
        AND prompt_tokens - coalesce(p_cached_tokens, 0) - coalesce(reuse_pulled_tokens, 0) > 0
    GROUP BY p_engine
), reused AS (
    SELECT
        *,
        coalesce(list_sum([
            prefill_reuse_dispatch_ns, prefill_reuse_handshake_ns, prefill_reuse_post_ns, prefill_reuse_wire_ns,
            prefill_reuse_detect_ns, prefill_reuse_report_ns, prefill_reuse_promote_ns, prefill_reuse_admit_ns
        ]), 0) AS added_ns
    FROM requests
    WHERE reuse_outcome IS NOT NULL
)
SELECT
    r.label,
    r.reuse_outcome,
    r.p_engine,
    count(*) AS requests,
    sum(r.reuse_offered_tokens)::BIGINT AS offered_tokens,
    coalesce(sum(r.reuse_pulled_tokens), 0)::BIGINT AS pulled_tokens,
    sum(r.reuse_offered_tokens - coalesce(r.reuse_pulled_tokens, 0))::BIGINT AS skipped_tokens,
    round(quantile_cont(r.ttft_ns, 0.5) / 1e6, 3) AS p50_ttft_ms,
    round(avg(r.added_ns) / 1e6, 3) AS mean_wait_added_ms,
    round(any_value(c.ns_per_token) / 1e3, 3) AS us_per_token,
    round(
        avg(r.reuse_pulled_tokens * c.ns_per_token - r.added_ns) FILTER (r.reuse_pulled_tokens > 0) / 1e6, 3
    ) AS mean_net_benefit_ms
FROM reused AS r
LEFT JOIN cost AS c ON c.p_engine = r.p_engine
GROUP BY r.label, r.reuse_outcome, r.p_engine
ORDER BY r.label, requests DESC, r.reuse_outcome, r.p_engine
