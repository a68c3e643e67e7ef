"""The SQL of `decide`, step by step. Each makes a temporary table of its own name.

`heads` are the incoming samples (`spill.HEAD`), `older` hashes of rows that recorded none; `plan`,
`plan_log`, `tombstones` and `samples` are the lake's views.
"""

from hslake.views import SAME

# What is planned now, without tokens.
PLANNED = """
    select p.sample_id, p.source, p.split, p.length, p.token_hash,
        coalesce(p.mask_hash, o.mask_hash) as mask_hash,
        coalesce(p.prompt_hash, o.prompt_hash) as prompt_hash,
        p.content_hash, p.tokenizer_hash, p.template_hash,
        coalesce(p.generation, 1) as generation, p.origin
    from plan p
    left join older o on o.sample_id = p.sample_id and o.commit_version = p.commit_version
"""

# Text without an id got one from its tokens once: where that is planned, it is this sample.
NAMED = """
    select h.* replace (coalesce(p.sample_id, h.sample_id) as sample_id)
    from heads h
    left join planned p on p.sample_id = h.legacy_id and p.content_hash is null
"""

# The first row whose id another one has that it does not merely repeat.
TWICE = """
    with firsts as (
        select sample_id, min(n) as n from heads where reason is null
        group by sample_id having count(*) > 1
    )
    select h.sample_id, h.file, h.row, f.file as first_file, f.row as first_row
    from heads h
    join firsts on firsts.sample_id = h.sample_id
    join heads f on f.n = firsts.n
    where h.reason is null and h.n <> f.n and (
        h.given or h.token_hash <> f.token_hash or h.mask_hash <> f.mask_hash
        or h.source <> f.source or h.split is distinct from f.split
    )
    order by h.n limit 1
"""

# Each id once, without what is rejected.
KEPT = """
    select * from heads where reason is null
    qualify row_number() over (partition by sample_id order by n) = 1
"""

# Rows of which the tokens were deleted from the lake, under whatever id: whole, or as pieces.
GONE = r"""
    with gone as (
        select sample_id, regexp_replace(sample_id, '@\d+-\d+$', '') as stem,
            try_cast(regexp_extract(sample_id, '@(\d+)-(\d+)$', 1) as bigint) as first,
            try_cast(regexp_extract(sample_id, '@(\d+)-(\d+)$', 2) as bigint) as past
        from tombstones where generation is null
    ), incoming as (
        select n, sample_id, origin, first, past,
            regexp_replace(sample_id, '@\d+-\d+$', '') as stem
        from kept
    )
    select n from incoming semi join gone using (sample_id)
    union
    select h.n from incoming h join gone g on g.sample_id = h.origin
    union
    select h.n from incoming h join gone g on g.stem = h.stem
    where h.origin is not null and g.first < h.past and h.first < g.past
    union
    select h.n from incoming h join gone g on g.stem = h.sample_id
    where h.origin is null
"""

# `state`: new, deleted, unchanged, replaced (a new generation) or changed (an error).
COMPARED = """
    select h.*, p.generation as planned_generation, p.split as planned_split,
        case
            when p.sample_id is null and g.n is not null and not {again} then 'deleted'
            when p.sample_id is null then 'new'
            when h.source <> p.source or coalesce(h.split <> p.split, false) then 'changed'
            when h.token_hash = p.token_hash and h.mask_hash = p.mask_hash then 'unchanged'
            when h.content_hash = p.content_hash and (
                h.tokenizer_hash is distinct from p.tokenizer_hash
                or h.template_hash is distinct from p.template_hash
            ) then 'replaced'
            else 'changed'
        end as state
    from kept h
    left join planned p on p.sample_id = h.sample_id
    left join gone g on g.n = h.n
"""

CHANGED = """
    select h.n, h.file, h.row, h.sample_id, h.source, h.split, h.length, h.token_hash,
        p.source as planned_source, p.split as planned_split, p.length as planned_length,
        p.token_hash as planned_hash, coalesce(h.content_hash = p.content_hash, false) as same_text,
        h.tokenizer_hash is not distinct from p.tokenizer_hash
            and h.template_hash is not distinct from p.template_hash as same_template,
        count(*) over () as count
    from compared h join planned p on p.sample_id = h.sample_id
    where h.state = 'changed' order by h.n limit $shown
"""

# Planned rows of a sample that comes in other pieces now. `superseded`: by a new generation.
SIBLINGS = r"""
    with incoming as (
        select coalesce(origin, sample_id) as base, * from compared where state <> 'deleted'
    ), others as (
        select coalesce(origin, sample_id) as base, *,
            try_cast(regexp_extract(sample_id, '@(\d+)-(\d+)$', 1) as bigint) as first,
            try_cast(regexp_extract(sample_id, '@(\d+)-(\d+)$', 2) as bigint) as past
        from planned anti join kept using (sample_id)
    )
    select p.sample_id as planned, any_value(p.generation) as generation, min(h.n) as n,
        bool_or(h.content_hash = p.content_hash and (
            h.tokenizer_hash is distinct from p.tokenizer_hash
            or h.template_hash is distinct from p.template_hash
        )) is true as superseded,
        bool_or(p.origin is null or h.origin is null
            or p.first < h.past and h.first < p.past) is true as overlaps
    from others p join incoming h on h.base = p.base
    where p.origin is not null or h.origin is not null
    group by p.sample_id
"""

OTHER_PIECES = """
    select h.file, h.row, h.sample_id, s.planned, count(*) over () as count
    from siblings s join compared h on h.n = s.n
    where s.overlaps and not s.superseded order by h.n limit $shown
"""

UNDEDUPED = "select * from compared"

# A new sample whose tokens are there under another id is left out; of several, the first stays.
DECIDED = """
    with there as (
        select token_hash from planned
        anti join (select sample_id from compared where state = 'replaced') r using (sample_id)
        anti join (select planned from siblings where superseded) s
            on s.planned = planned.sample_id
        union
        select token_hash from compared where state = 'replaced'
    )
    select c.* replace (
        case when c.state <> 'new' then c.state
            when t.token_hash is not null or row_number() over (
                partition by c.token_hash, c.state order by c.n
            ) > 1 then 'duplicate'
            else 'new' end as state
    )
    from compared c left join there t on t.token_hash = c.token_hash
"""

# Where a prompt is already: what is planned, and its new generation, comes before what rows say of
# themselves.
PROMPTS = """
    with said as (
        select prompt_hash, split, 0 as turn from planned
        where prompt_hash in (select prompt_hash from decided)
        union all
        select prompt_hash, planned_split, 0 from decided where state = 'replaced'
        union all
        select h.prompt_hash, p.split, 0
        from siblings s
        join planned p on p.sample_id = s.planned
        join decided h on h.n = s.n
        where s.superseded
        union all
        select prompt_hash, split, 1 from decided where state = 'new' and split is not null
    )
    select prompt_hash, arg_min(split, (turn, split)) as split from said
    where prompt_hash is not null group by prompt_hash
"""

CHOSEN = """
    select d.* replace (
        case when d.state = 'replaced' then d.planned_split
            else coalesce(d.split, p.split, d.by_hash) end as split
    ),
        d.split is null and d.state = 'new' and p.split <> d.by_hash as followed,
        1 + coalesce(g.generation, 0) as generation
    from decided d
    left join prompts p on p.prompt_hash = d.prompt_hash
    left join (
        select sample_id, max(coalesce(generation, 1)) as generation from plan_log
        where op = 'add' and sample_id in (select sample_id from decided) group by sample_id
    ) g on g.sample_id = d.sample_id
    where d.state in ('new', 'replaced')
"""

ENDED = """
    select sample_id, planned_generation as generation from chosen where state = 'replaced'
    union all
    select planned, generation from siblings where superseded
"""

# Captured with the same tokens, by an hslake that recorded no mask: nobody could tell them apart.
UNKNOWN_MASKS = """
    select count(*) from chosen c
    join planned p on p.sample_id = c.sample_id
    join samples s on s.sample_id = c.sample_id
    where c.state = 'replaced' and c.token_hash = p.token_hash and s.token_hash = p.token_hash
        and s.mask_hash is null
"""

# Prompts of this call that are in more than one split, with two samples of each.
STRADDLING = """
    with all_rows as (
        select prompt_hash, split, sample_id from planned
        anti join ended using (sample_id)
        where prompt_hash in (select prompt_hash from kept)
        union all
        select prompt_hash, split, sample_id from chosen
    )
    select prompt_hash, min(split) as first_split, max(split) as last_split,
        arg_min(sample_id, (split, sample_id)) as first_id,
        arg_max(sample_id, (split, sample_id)) as last_id, count(*) as samples
    from all_rows where prompt_hash is not null
    group by prompt_hash having count(distinct split) > 1
"""

# What is added of the samples `first` to `last`.
ADDED = """
    select n, sample_id, source, split, length, supervised as supervised_tokens, token_hash,
        mask_hash, prompt_hash, content_hash, tokenizer_hash, template_hash, generation, origin
    from chosen where n between $first and $last order by n
"""

# Of what a new generation ends: how many samples were captured, and of what it begins, how many are
# captured already (an old template came back).
CAPTURED_ENDED = f"""
    select count(*) from ended e
    join planned p on p.sample_id = e.sample_id
    join samples s on {SAME}
"""
CAPTURED_BEGUN = """
    select count(*) from chosen p
    join samples s on s.sample_id = p.sample_id and s.token_hash = p.token_hash
        and coalesce(s.mask_hash = p.mask_hash, true)
    where p.state = 'replaced'
"""
