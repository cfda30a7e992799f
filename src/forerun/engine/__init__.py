"""The engine: schedule, draft, plan, forward, verify, commit, emit."""
