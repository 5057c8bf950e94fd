"""
A household of small parts that know each other only by the topics of one bus.

    python -m examples.household --workspace ./household-workspace --seconds 3

``wiring`` says who speaks and who listens; each other module has one part, or a few that belong together. What is hard
about a part is taken from ``tidings.cognition``: the gate, the write workflow, the triggers, working memory, routing.
"""
