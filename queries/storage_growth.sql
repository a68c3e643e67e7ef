-- name: storage_growth
-- description: samples, tokens and bytes added by each manifest version, and totals of what it holds
-- totals: less the samples that were hidden, and the segments that were removed (they take their
-- bytes until then)
select
    commit_version as version,
    committed_at,
    added as samples,
    tokens,
    raw_bytes,
    stored_bytes,
    sum(added - hidden) over growth::bigint as total_samples,
    sum(tokens - hidden_tokens) over growth::bigint as total_tokens,
    sum(raw_bytes - freed_raw_bytes) over growth::bigint as total_raw_bytes,
    sum(stored_bytes - freed_bytes) over growth::bigint as total_stored_bytes,
    round(stored_bytes / nullif(raw_bytes, 0), 4) as ratio
from versions
where added > 0 or hidden > 0 or condemned_segments > 0
window growth as (order by commit_version)
order by commit_version
