-- title: Where the prompt's tokens came from
-- description: Prompt tokens that P had cached, computed or read back from D, and those that D had cached, was sent by
--   P or computed again. Each sum is over the requests of which it is known; requests without a first token count too.
-- column label: Kind of traffic; empty is production
-- column model: Model name as served; NULL where it is not known
-- column connector: push, pull, bidirectional or local
-- column requests: Requests
-- column prompt_tokens: Prompt tokens
-- column p_cached_tokens: Of these: P took from its own prefix cache
-- column p_cached_percent: The same, of the prompt tokens of requests of which it is known
-- column reuse_pulled_tokens: P read back from D, which had kept them (bidirectional)
-- column p_computed_tokens: The rest of what P had to make: computed there
-- column d_cached_tokens: D took from its own prefix cache
-- column d_cached_percent: The same, of the prompt tokens of requests of which it is known
-- column transferred_tokens: D received their KV from P
-- column recomputed_tokens: D computed although P had them, after a failure or a preemption
-- column recomputed: Requests for which that happened
-- column output_tokens: Tokens that D generated
SELECT
    label,
    model,
    connector,
    count(*) AS requests,
    sum(prompt_tokens)::BIGINT AS prompt_tokens,
    sum(p_cached_tokens)::BIGINT AS p_cached_tokens,
    round(
        100 * sum(p_cached_tokens) / nullif(sum(prompt_tokens) FILTER (p_cached_tokens IS NOT NULL), 0), 2
    ) AS p_cached_percent,
    sum(reuse_pulled_tokens)::BIGINT AS reuse_pulled_tokens,
    sum(greatest(0, prompt_tokens - p_cached_tokens - coalesce(reuse_pulled_tokens, 0))) FILTER (
        prefill_compute_ns > 0 AND p_engine IS NOT NULL
    )::BIGINT AS p_computed_tokens,
    sum(d_cached_tokens)::BIGINT AS d_cached_tokens,
    round(
        100 * sum(d_cached_tokens) / nullif(sum(prompt_tokens) FILTER (d_cached_tokens IS NOT NULL), 0), 2
    ) AS d_cached_percent,
    sum(transferred_tokens)::BIGINT AS transferred_tokens,
    sum(recomputed_tokens)::BIGINT AS recomputed_tokens,
    count(*) FILTER (recomputed_tokens > 0) AS recomputed,
    sum(output_tokens)::BIGINT AS output_tokens
FROM requests
GROUP BY label, model, connector
ORDER BY label, requests DESC, model, connector
