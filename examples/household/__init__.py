"""
A household of small parts that know each other only by the topics of one bus.

    python -m examples.household --workspace ./household-workspace --seconds 3

``wiring`` says who speaks and who listens; each other module is one part, or two that belong together.
"""
