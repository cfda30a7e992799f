"""The plan on machines that are not here: recorded or made-up drafts, a table of costs, a clock."""
