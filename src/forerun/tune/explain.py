"""In words: what a draft cost, what it would have had to bring, and what stands in its way."""

from __future__ import annotations

from forerun.tune.bench import Row

RARE = 0.1  # share of drafted passes below which the plan has given a draft up
SAME = 0.03  # speed-ups within this of 1 are no difference


def explain(row: Row, plain: Row) -> str:
    """One line on a draft. plain: plain decoding of the same prompts and batch size."""
    drafted = 1 - row.plain_share
    where = f"{row.spec} on {row.workload} at batch {row.batch}"
    if row.break_even is None:
        return f"{where}: nothing was drafted; as far as could be seen, no draft would have paid."
    line = (
        f"{where}: drafts in {drafted:.0%} of the passes bring {row.acceptance_length:.2f} tokens, "
        f"{row.break_even:.2f} is break-even"
    )
    if row.acceptance_length - row.break_even > SAME / drafted:
        return f"{line}."
    if drafted < RARE:
        return f"{line}; the rest of the time the plan expected less, and asked for none."
    return f"{line}; {_obstacle(row, plain)}."


def _obstacle(row: Row, plain: Row) -> str:
    """What takes most of the time that accepted tokens save."""
    longer = {
        "drafting": row.draft_ms - plain.draft_ms,
        "rows": row.verify_ms - plain.verify_ms,
        "rest": row.other_ms - plain.other_ms,
    }
    most = max(longer, key=lambda name: longer[name])
    if most == "drafting":
        return f"drafting takes {longer[most]:.2f} ms a pass: a cheaper or shorter draft might pay"
    if most == "rest":
        return f"checking and bookkeeping take {longer[most]:.2f} ms a pass more than plain"
    if row.batch > 1:
        return (
            f"{row.rows_per_pass:.1f} rows a pass and sequence take {longer[most]:.2f} ms more "
            "than one: with fewer sequences at once they would be cheaper"
        )
    return (
        f"{row.rows_per_pass:.1f} rows a pass take {longer[most]:.2f} ms more than one: more of "
        "the drafted tokens would have to be right"
    )
