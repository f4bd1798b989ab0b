"""What conversations gained by KV that D keeps between turns, as figures: SQL over the tables of the store.

Reading tokens back spares P their prefill, at P's own median cost per computed token of that model, and adds
the time in the prefill.reuse_* steps on the critical path. The difference, an estimate, is the net benefit.
The question `reuse` defines them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from kvscope import query
from kvscope.analysis.paging import OVER, Row, Source, Window, ask
from kvscope.errors import UsageError
from kvscope.text import printable

MIN_TURNS = 20
"""A threshold or TTL is favoured from so many turns on."""
ENOUGH_OF_BEST = 0.95
"""The favoured TTL is the shortest that keeps this part of the most net benefit."""
THRESHOLDS = (0, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
"""kv_recompute_threshold: tokens below which P computes."""
TTLS_S = (1, 2, 5, 10, 15, 30, 60, 120, 240, 480, 900, 1800, 3600)
"""decoder_kv_blocks_ttl, seconds."""
PAUSES_S = (1, 5, 15, 60, 300, 900, 3600)
"""Bounds of the bars of the distribution of pauses."""

_PRICED = query.questions()["reuse"].sql.rpartition("\nSELECT\n")[0]
"""A WITH clause: `priced`, requests with what reading back spared and added, of which `reuse` is the sum."""

LIST_COLUMNS = {
    "session": "Id of its first request",
    "turns": "Turns seen",
    "first_at_ns": "Arrival of the first of these",
    "last_at_ns": "Arrival of the last",
    "last_id": "Id of the last turn's request",
    "prompt_tokens": "Prompt tokens of the last turn",
    "offered_tokens": "Tokens whose KV D had kept, over all turns",
    "pulled_tokens": "Of these, tokens that P read back",
    "recomputed_tokens": "Of these, tokens that P computed again",
    "outcomes": "What became of what was offered",
    "saved_ns": "Prefill spared (estimate)",
    "wait_ns": "Wait added by reading back",
    "net_ns": "Net benefit: spared minus wait (estimate)",
    "held_block_s": "KV block-seconds held on D after its turns",
    "used_block_s": "Of these, for blocks that the next turn read back",
    "max_pause_ns": "Longest time between two turns",
    "ttl_ns": "Median time from the beginning of D's leases to their deadline",
    "ttft_ns": "Median TTFT",
}
"""Of the list of conversations; all can be sorted by."""


def parameters(about: Window) -> dict[str, Any]:
    """Of a query about conversations. The end of the window is a condition of requests alone: leases of the
    last turns begin later."""
    return {name: value for name, value in about.parameters().items() if name != "until"}


def _ask(source: Source, about: Window, sql: str) -> list[Row]:
    """The rows of a SELECT from `turns` or `valued`."""
    return ask(source, valued_sql(about.until_ns) + sql, parameters(about))


def valued_sql(until_ns: int | None = None) -> str:
    """A WITH clause: `turns`, a row per turn of a conversation: what it gained and what D kept after it; and
    `valued`, of those for which KV was kept, what reading it back gained or would have gained."""
    over = OVER if until_ns is None else f"{OVER} AND arrived_at_ns < {until_ns}"
    priced = _PRICED.replace("FROM requests", f"FROM (SELECT * FROM requests WHERE {over})")
    return f"""{priced}, sizes AS (
    SELECT engine, max(TRY_CAST(fingerprint->>'block_size' AS BIGINT)) AS block_size
    FROM engines
    GROUP BY engine
), kept AS (
    SELECT
        request_id, engine, min(armed_at_ns) AS armed_ns, max(deadline_at_ns) AS deadline_ns,
        CASE WHEN count(ended_at_ns) = count(*) THEN max(ended_at_ns) END AS ended_ns
    FROM leases
    WHERE request_id IS NOT NULL
    GROUP BY request_id, engine
), chained AS (
    SELECT
        a.*,
        arrived_at_ns + ttft_ns + decode_generate_ns AS end_ns,
        lead(a.turn) OVER w AS next_turn,
        lead(arrived_at_ns) OVER w AS next_arrived_ns,
        lead(coalesce(reuse_pulled_tokens, 0)) OVER w AS next_pulled_tokens,
        lag(a.turn) OVER w AS last_turn,
        lag(arrived_at_ns + ttft_ns + decode_generate_ns) OVER w AS last_end_ns,
        lag(d_engine) OVER w AS last_d_engine
    FROM priced AS a
    WHERE session IS NOT NULL
    WINDOW w AS (PARTITION BY session ORDER BY turn, arrived_at_ns, id)
), turns AS (
    SELECT
        c.*,
        CASE WHEN last_turn = c.turn - 1 AND last_end_ns IS NOT NULL THEN
            greatest(arrived_at_ns - last_end_ns, 0)
        END AS pause_ns,
        last_turn = c.turn - 1 AND last_d_engine != d_engine AS changed_d,
        CASE WHEN reuse_outcome = 'pulled' THEN added_ns END AS wait_ns,
        CASE
            WHEN reuse_outcome = 'pulled' THEN reuse_pulled_tokens
            WHEN reuse_outcome IN ('below threshold', 'expired') AND reuse_offered_tokens IS NOT NULL THEN
                greatest(least(reuse_offered_tokens, prompt_tokens) - coalesce(p_cached_tokens, 0), 0)
        END AS wanted_tokens,
        CASE WHEN reuse_outcome != 'local hit' AND reuse_offered_tokens IS NOT NULL THEN
            greatest(
                least(reuse_offered_tokens, prompt_tokens)
                - coalesce(p_cached_tokens, 0) - coalesce(reuse_pulled_tokens, 0),
                0
            )
        END AS recomputed_here,
        k.armed_ns,
        k.ended_ns - k.armed_ns AS held_ns,
        k.deadline_ns - k.armed_ns AS ttl_ns,
        CASE WHEN k.armed_ns IS NOT NULL AND block_size > 0 THEN
            ceil((prompt_tokens + coalesce(output_tokens, 0)) / block_size)
        END AS blocks,
        CASE WHEN k.armed_ns IS NOT NULL AND block_size > 0 THEN
            CASE WHEN next_turn = c.turn + 1 THEN
                least(
                    ceil(next_pulled_tokens / block_size),
                    ceil((prompt_tokens + coalesce(output_tokens, 0)) / block_size)
                )
            ELSE 0 END
        END AS used_blocks
    FROM chained AS c
    LEFT JOIN kept AS k ON k.request_id = c.id AND k.engine = c.d_engine
    LEFT JOIN sizes ON sizes.engine = c.d_engine
), fit AS (
    -- The wait that reading back would have added where it was not done: a line through those where it was.
    SELECT
        p_engine,
        model,
        CASE WHEN count(DISTINCT wanted_tokens) > 1 THEN regr_intercept(wait_ns, wanted_tokens)
        ELSE avg(wait_ns) END AS base_ns,
        CASE WHEN count(DISTINCT wanted_tokens) > 1 THEN regr_slope(wait_ns, wanted_tokens)
        ELSE 0 END AS slope_ns
    FROM turns
    WHERE net_ns IS NOT NULL
    GROUP BY p_engine, model
), valued AS (
    SELECT
        reuse_outcome,
        wanted_tokens,
        pause_ns,
        ttft_ns,
        coalesce(
            t.net_ns, wanted_tokens * ns_per_token - greatest(base_ns + slope_ns * wanted_tokens, 0)
        ) AS net_ns
    FROM turns AS t
    JOIN fit AS f ON f.p_engine = t.p_engine AND f.model IS NOT DISTINCT FROM t.model
    WHERE wanted_tokens > 0 AND ns_per_token IS NOT NULL
)
"""


def overall(source: Source, about: Window) -> Row:
    """Sums over all conversations; None is "not known"."""
    bars = ", ".join(
        f"count(*) FILTER (pause_ns >= {low}::BIGINT * 1000000000"
        + (f" AND pause_ns < {high}::BIGINT * 1000000000)" if high else ")")
        for low, high in zip((0, *PAUSES_S), (*PAUSES_S, 0), strict=True)
    )
    (row,) = _ask(
        source,
        about,
        f"""
SELECT
    count(DISTINCT session) AS conversations,
    count(*) AS turns,
    count(*) FILTER (turn > 1) AS later_turns,
    count(*) FILTER (reuse_outcome IS NOT NULL) AS offered_turns,
    sum(reuse_offered_tokens)::BIGINT AS offered_tokens,
    sum(reuse_pulled_tokens)::BIGINT AS pulled_tokens,
    sum(recomputed_here)::BIGINT AS recomputed_tokens,
    count(*) FILTER (changed_d) AS changed_d,
    count(*) FILTER (saved_ns IS NOT NULL) AS valued_turns,
    count(*) FILTER (reuse_outcome = 'pulled') AS pulled_turns,
    sum(saved_ns)::BIGINT AS saved_ns,
    sum(wait_ns) FILTER (saved_ns IS NOT NULL)::BIGINT AS wait_ns,
    sum(net_ns)::BIGINT AS net_ns,
    count(*) FILTER (net_ns < 0) AS turns_at_a_loss,
    min(cost_requests) FILTER (saved_ns IS NOT NULL) AS cost_requests,
    min(ns_per_token) AS least_ns_per_token,
    max(ns_per_token) AS most_ns_per_token,
    count(armed_ns) AS leases,
    count(armed_ns) FILTER (held_ns IS NOT NULL AND blocks IS NOT NULL) AS measured_leases,
    sum(blocks * held_ns / 1e9) AS held_block_s,
    sum(used_blocks * held_ns / 1e9) AS used_block_s,
    sum(blocks) FILTER (held_ns IS NOT NULL)::BIGINT AS held_blocks,
    sum(used_blocks) FILTER (held_ns IS NOT NULL)::BIGINT AS used_blocks,
    count(pause_ns) AS pauses,
    quantile_cont(pause_ns, 0.5)::BIGINT AS p50_pause_ns,
    quantile_cont(pause_ns, 0.9)::BIGINT AS p90_pause_ns,
    quantile_cont(pause_ns, 0.99)::BIGINT AS p99_pause_ns,
    max(pause_ns) AS max_pause_ns,
    quantile_cont(ttl_ns, 0.5)::BIGINT AS ttl_ns,
    CASE WHEN count(ttl_ns) > 0 THEN
        count(*) FILTER (pause_ns > (SELECT quantile_cont(ttl_ns, 0.5) FROM turns))
    END AS overslept,
    [{bars}] AS pause_counts
FROM turns""",
    )
    return row


def outcomes(source: Source, about: Window) -> dict[str, int]:
    """Turns by what became of the KV that D had kept for them."""
    found = _ask(
        source,
        about,
        "SELECT reuse_outcome AS outcome, count(*) AS turns FROM turns "
        "WHERE reuse_outcome IS NOT NULL GROUP BY 1 ORDER BY turns DESC, outcome",
    )
    return {row["outcome"]: row["turns"] for row in found}


class Candidates(NamedTuple):
    """What other settings would have given."""

    turns: int
    """On which it rests: turns that read KV back, or pauses."""
    rows: list[Row]
    favoured: Row | None
    """None where there are too few turns."""
    why_not: str = ""


def thresholds(source: Source, about: Window) -> Candidates:
    """Net benefit by kv_recompute_threshold, over turns whose KV was there: read back, or below it."""
    rows = _ask(
        source,
        about,
        f""", candidates AS (SELECT unnest({list(THRESHOLDS)}) AS threshold)
SELECT
    threshold,
    (SELECT count(net_ns) FROM turns) AS pulled_turns,
    count(*) FILTER (wanted_tokens >= threshold) AS turns_read_back,
    coalesce(sum(net_ns) FILTER (wanted_tokens >= threshold), 0)::BIGINT AS net_ns
FROM candidates
LEFT JOIN valued ON reuse_outcome IN ('pulled', 'below threshold')
GROUP BY threshold
ORDER BY threshold""",
    )
    turns = rows[0]["pulled_turns"] if rows else 0
    if turns < MIN_TURNS:
        return Candidates(
            turns, rows, None, f"not enough data: {turns} of {MIN_TURNS} turns that read KV back"
        )
    best = max(row["net_ns"] for row in rows)
    if best <= 0:
        return Candidates(turns, rows, None, "reading back did not pay at any threshold")
    return Candidates(turns, rows, next(row for row in rows if row["net_ns"] == best))


def ttls(source: Source, about: Window) -> Candidates:
    """Net benefit, and block-seconds held, by decoder_kv_blocks_ttl, over turns before or after which D kept
    KV."""
    rows = _ask(
        source,
        about,
        f""", candidates AS (SELECT unnest({list(TTLS_S)}) AS ttl_s), reached AS (
    SELECT
        ttl_s,
        count(pause_ns) AS pauses,
        count(*) FILTER (pause_ns <= ttl_s::BIGINT * 1000000000) AS turns_read_back,
        coalesce(sum(net_ns) FILTER (pause_ns <= ttl_s::BIGINT * 1000000000), 0)::BIGINT AS net_ns
    FROM candidates LEFT JOIN valued ON pause_ns IS NOT NULL AND reuse_outcome IN ('pulled', 'expired')
    GROUP BY ttl_s
), held AS (
    SELECT
        ttl_s,
        sum(blocks * CASE WHEN next_turn = turn + 1 THEN
            least(ttl_s, greatest(next_arrived_ns - armed_ns, 0) / 1e9)
        ELSE ttl_s END) AS block_s
    FROM candidates LEFT JOIN turns ON blocks IS NOT NULL AND armed_ns IS NOT NULL
    GROUP BY ttl_s
)
SELECT
    ttl_s, (SELECT count(net_ns) FROM turns) AS pulled_turns, pauses, turns_read_back, net_ns, block_s
FROM reached JOIN held USING (ttl_s)
ORDER BY ttl_s""",
    )
    turns, pauses = (rows[0]["pulled_turns"], rows[0]["pauses"]) if rows else (0, 0)
    if turns < MIN_TURNS:
        return Candidates(
            turns, rows, None, f"not enough data: {turns} of {MIN_TURNS} turns that read KV back"
        )
    if pauses < MIN_TURNS:
        return Candidates(
            pauses, rows, None, f"not enough data: {pauses} of {MIN_TURNS} pauses before such turns"
        )
    best = max(row["net_ns"] for row in rows)
    if best <= 0:
        return Candidates(pauses, rows, None, "reading back did not pay at any TTL")
    return Candidates(pauses, rows, next(row for row in rows if row["net_ns"] >= ENOUGH_OF_BEST * best))


def conversations(source: Source, about: Window, sort: str, limit: int) -> list[Row]:
    """The conversations, one row each.

    Args:
        sort: a column, the largest first; `column:asc` for the smallest first.

    Raises:
        UsageError: there is no such column.
    """
    name, _, direction = sort.partition(":")
    if name not in LIST_COLUMNS or direction not in ("", "asc", "desc"):
        raise UsageError(
            f"{printable(sort)[:40]!r} is no order; write one of {', '.join(LIST_COLUMNS)}; :asc turns it"
        )
    return _ask(
        source,
        about,
        f""", by_outcome AS (
    SELECT session, string_agg(reuse_outcome || ' ' || n, ', ' ORDER BY n DESC, reuse_outcome) AS outcomes
    FROM (
        SELECT session, reuse_outcome, count(*) AS n FROM turns WHERE reuse_outcome IS NOT NULL GROUP BY ALL
    )
    GROUP BY session
)
SELECT
    t.session,
    count(*) AS turns,
    min(arrived_at_ns) AS first_at_ns,
    max(arrived_at_ns) AS last_at_ns,
    arg_max(t.id, arrived_at_ns) AS last_id,
    arg_max(prompt_tokens, arrived_at_ns) AS prompt_tokens,
    sum(reuse_offered_tokens)::BIGINT AS offered_tokens,
    sum(reuse_pulled_tokens)::BIGINT AS pulled_tokens,
    sum(recomputed_here)::BIGINT AS recomputed_tokens,
    any_value(outcomes) AS outcomes,
    sum(saved_ns)::BIGINT AS saved_ns,
    sum(wait_ns)::BIGINT AS wait_ns,
    sum(net_ns)::BIGINT AS net_ns,
    sum(blocks * held_ns / 1e9) AS held_block_s,
    sum(used_blocks * held_ns / 1e9) AS used_block_s,
    max(pause_ns) AS max_pause_ns,
    quantile_cont(ttl_ns, 0.5)::BIGINT AS ttl_ns,
    quantile_cont(ttft_ns, 0.5)::BIGINT AS ttft_ns
FROM turns AS t
LEFT JOIN by_outcome AS o ON o.session = t.session
GROUP BY t.session
ORDER BY "{name}" {"ASC" if direction == "asc" else "DESC"} NULLS LAST, t.session
LIMIT {int(limit)}""",
    )


def turns_of(source: Source, about: Window, session: int, limit: int) -> list[Row]:
    """The turns of one conversation, in order."""
    return _ask(
        source,
        about,
        f"""
SELECT
    turn, id, client_id, coalesce(label, '') AS label, arrived_at_ns, pause_ns, p_engine, d_engine,
    prompt_tokens, output_tokens,
    reuse_outcome, reuse_offered_tokens AS offered_tokens, reuse_pulled_tokens AS pulled_tokens,
    recomputed_here AS recomputed_tokens, saved_ns::BIGINT AS saved_ns, wait_ns::BIGINT AS wait_ns,
    net_ns::BIGINT AS net_ns, blocks::BIGINT AS blocks, used_blocks::BIGINT AS used_blocks,
    held_ns, ttl_ns, ttft_ns
FROM turns
WHERE session = {int(session)}::UBIGINT
ORDER BY turn, arrived_at_ns, id
LIMIT {int(limit)}""",
    )


def session_of(source: Source, text: str) -> int | None:
    """The conversation that a number names, or that a request is a turn of.

    Raises:
        KvscopeError: no request, or several.
    """
    if text.isascii() and text.isdigit() and len(text) <= 20:
        found = ask(
            source,
            f"SELECT count(*) AS turns FROM requests WHERE session::HUGEINT = {int(text)}::HUGEINT",
            {},
        )
        if found[0]["turns"]:
            return int(text)
    request: dict[str, Any] = source.request(text)["request"]
    return int(request["session"]) if request["session"] else None
