"""The SQL views every query sees, over the append-only tables `manifest` and `plan_log`.

Anti joins are written as joins: DuckDB plans NOT EXISTS over Parquet as a de-correlated subquery,
which is seven times slower on ten million rows.

Each mention of a view opens every file of its table again: with one small file a commit, which is
what a compactor leaves, that costs more than the rows. A view or query that needs samples more than
once keeps the columns it needs in a materialized CTE.
"""

# Views over a table's files, and the table.
LOGS = {"manifest": "manifest", "plan_log": "plan", "run_log": "runs"}

# What takes rows away is small and in few files: read once, when a connection is made.
HIDES = "select distinct sample_id, segment_id from ({log}) where op = 'hide'"
CONDEMNED = "select distinct segment_id from ({log}) where op = 'condemn'"
TOMBSTONES = """
    select sample_id, max(commit_version) as commit_version,
        arg_max_null(generation, commit_version) as generation
    from ({log}) where op = 'tombstone' group by sample_id
"""
# (table, over which log, its rows)
TAKEN_AWAY = (
    ("hides", "manifest", HIDES),
    ("condemned", "manifest", CONDEMNED),
    ("tombstones", "plan", TOMBSTONES),
)

# A committed sample s is what the plan's row p asks for: the same tokens and the same mask (which
# rows of before do not tell). Otherwise it is of another generation of the plan.
SAME = (
    "(s.sample_id = p.sample_id and s.token_hash = p.token_hash "
    "and coalesce(s.mask_hash = p.mask_hash, true))"
)

VIEWS: dict[str, str] = {
    # Nothing here looks at more than the small set of hides: no window over the manifest.
    "samples": """
        select m.* exclude (op, reason)
        from manifest m
        anti join hides h on h.sample_id = m.sample_id and h.segment_id = m.segment_id
        where m.op = 'add'
    """,
    "segments": """
        select
            m.segment_id,
            count(*) filter (h.segment_id is null) as samples,
            coalesce(sum(m.length) filter (h.segment_id is null), 0)::bigint as tokens,
            count(h.segment_id) as hidden_samples,
            any_value(m.segment_tokens) as segment_tokens,
            any_value(m.segment_raw_bytes) as raw_bytes,
            any_value(m.segment_stored_bytes) as stored_bytes,
            any_value(m.inventory_digest) as inventory_digest,
            min(m.committed_at) as committed_at,
            min(m.commit_version) as commit_version
        from manifest m
        left join hides h on h.sample_id = m.sample_id and h.segment_id = m.segment_id
        anti join condemned c on c.segment_id = m.segment_id
        where m.op = 'add'
        group by m.segment_id
    """,
    # A tombstone ends what was planned before it. The id may be planned again: later, or in the
    # very commit of the tombstone, which then begins a generation.
    "plan": """
        select p.* exclude (op)
        from plan_log p
        anti join tombstones t
            on t.sample_id = p.sample_id and t.commit_version > p.commit_version
        where p.op = 'add'
    """,
    # Missing is counted sample by sample: a count of each side would hide one that is missing
    # behind one that nobody planned. Another token hash is another sample.
    "coverage": f"""
        with planned as (
            select source, split, count(*) as samples, sum(length)::bigint as tokens
            from plan group by source, split
        ), missing as (
            select p.source, p.split, count(*) as samples, sum(p.length)::bigint as tokens
            from plan p
            anti join samples s on {SAME}
            group by p.source, p.split
        )
        select
            p.source,
            p.split,
            p.samples as planned,
            p.samples - coalesce(m.samples, 0) as committed,
            coalesce(m.samples, 0) as missing,
            p.tokens as planned_tokens,
            p.tokens - coalesce(m.tokens, 0) as committed_tokens,
            coalesce(m.tokens, 0) as missing_tokens,
            (p.tokens - coalesce(m.tokens, 0)) / p.tokens as fraction
        from planned p
        left join missing m on m.source = p.source and m.split = p.split
    """,
    # Live samples that the plan asks for in another way now, or (planned_generation null) no more,
    # since a new generation cut them in another way. A compactor replaces the former as they come.
    "invalidated": f"""
        select s.sample_id, s.source, s.split, s.length, s.token_hash,
            coalesce(s.generation, 1) as generation,
            coalesce(p.generation, 1) as planned_generation,
            p.length as planned_length, s.segment_id
        from samples s join plan p on p.sample_id = s.sample_id
        where not {SAME}
        union all
        select s.sample_id, s.source, s.split, s.length, s.token_hash,
            coalesce(s.generation, 1), null, null, s.segment_id
        from samples s
        join tombstones t on t.sample_id = s.sample_id and t.generation is not null
        anti join plan p on p.sample_id = s.sample_id
    """,
    "versions": """
        with per_segment as (
            select
                commit_version, segment_id, min(committed_at) as committed_at,
                count(*) filter (op = 'add') as added,
                count(*) filter (op = 'hide') as hidden,
                count(*) filter (op = 'delete') as deleted,
                count(*) filter (op = 'condemn') as condemned,
                sum(length) filter (op = 'add') as tokens,
                any_value(segment_raw_bytes) filter (op = 'add') as raw_bytes,
                any_value(segment_stored_bytes) filter (op = 'add') as stored_bytes,
                sum(length) filter (op = 'hide') as hidden_tokens,
                any_value(segment_raw_bytes) filter (op = 'condemn') as freed_raw_bytes,
                any_value(segment_stored_bytes) filter (op = 'condemn') as freed_bytes
            from manifest group by commit_version, segment_id
        )
        select
            commit_version,
            min(committed_at) as committed_at,
            sum(added)::bigint as added,
            sum(hidden)::bigint as hidden,
            sum(deleted)::bigint as deleted,
            count(*) filter (added > 0) as segments,
            count(*) filter (condemned > 0) as condemned_segments,
            coalesce(sum(tokens), 0)::bigint as tokens,
            coalesce(sum(raw_bytes), 0)::bigint as raw_bytes,
            coalesce(sum(stored_bytes), 0)::bigint as stored_bytes,
            coalesce(sum(hidden_tokens), 0)::bigint as hidden_tokens,
            coalesce(sum(freed_raw_bytes), 0)::bigint as freed_raw_bytes,
            coalesce(sum(freed_bytes), 0)::bigint as freed_bytes
        from per_segment group by commit_version
    """,
    # What a run said last stands, be it killed before it could say how it ended.
    "runs": """
        select
            run_id,
            any_value(command) as command,
            any_value(host) as host,
            min(told_at) filter (op = 'start') as started_at,
            max(told_at) as last_seen_at,
            max(told_at) filter (op = 'end') as ended_at,
            any_value(outcome) filter (op = 'end') as outcome,
            any_value(reason) filter (op = 'end') as reason,
            arg_max(planned, seq) as planned,
            arg_max(committed, seq) as committed,
            arg_max(missing, seq) as missing,
            arg_max(captured, seq) as captured,
            arg_max(captured_tokens, seq) as captured_tokens,
            arg_max(retried, seq) as retried,
            arg_max(dropped, seq) as dropped,
            arg_max(refused, seq) as refused,
            count(*) filter (op = 'canary') as canaries,
            arg_max(elapsed_ms, seq) filter (captured is not null) / 1000 as seconds,
            1000 * arg_max(captured_tokens, seq)
                / nullif(arg_max(elapsed_ms, seq) filter (captured is not null), 0)
                as tokens_per_second,
            any_value(details) filter (op = 'start') as options,
            arg_max(details, seq) filter (op <> 'start') as servers
        from run_log where op <> 'repair' group by run_id
    """,
    # The latest word on a sample: of one commit, which is of one run, the row told last.
    "refusals": """
        select sample_id, token_hash, reason, server, run_id, told_at as refused_at
        from (
            select * from run_log where op in ('refuse', 'allow')
            qualify row_number() over (
                partition by sample_id, token_hash order by commit_version desc, seq desc
            ) = 1
        )
        where op = 'refuse'
    """,
    "canaries": """
        select
            sample_id, token_hash, attempt, server, run_id, told_at as asked_at, first_position,
            log_probs
        from run_log where op = 'canary'
    """,
}
