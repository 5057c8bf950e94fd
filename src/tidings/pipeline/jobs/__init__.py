"""The jobs that every log has, and what a job is: a pure function of tables, found by registration."""
